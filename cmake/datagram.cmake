# The module _loft_datagram, which exchanges values by datagrams (docs/links.md); of its own, as it
# needs libcrypto. Without OpenSSL's headers it is not built, and all else is.
find_package(OpenSSL 3.0 COMPONENTS Crypto QUIET)
if(NOT OpenSSL_FOUND)
  message(STATUS "loft_hvd: no OpenSSL 3 headers here (libssl-dev), so without datagrams: "
                 "gather=LossTolerant() takes other ways")
  return()
endif()
add_library(loft_datagram OBJECT csrc/datagram/endpoint.cpp csrc/datagram/port.cpp)
target_link_libraries(loft_datagram PUBLIC loft_options OpenSSL::Crypto Threads::Threads)
pybind11_add_module(_loft_datagram MODULE csrc/datagram/bind_datagram.cpp)
target_compile_options(_loft_datagram PRIVATE ${light_flags})
target_link_libraries(_loft_datagram PRIVATE loft_datagram loft_options)
# As those of checks.cmake.
foreach(check IN ITEMS datagram port)
  add_executable(check_${check} EXCLUDE_FROM_ALL csrc/checks/check_${check}.cpp)
  target_link_libraries(check_${check} PRIVATE loft_datagram loft_options)
endforeach()
if(LOFT_SANITIZE)  # as check_cpu: a tenth of the time
  target_compile_options(check_datagram PRIVATE -O2)
  target_compile_options(loft_datagram PRIVATE -O1)
endif()
