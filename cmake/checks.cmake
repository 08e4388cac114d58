# Programs that check the kernels without Python; `make test-all` builds and runs them, with and
# without sanitizers. Not part of the default build:
#   cmake --build build --target check_cpu check_device check_threads
foreach(check IN ITEMS cpu device threads)
  add_executable(check_${check} EXCLUDE_FROM_ALL csrc/checks/check_${check}.cpp ${objects})
  target_include_directories(check_${check} PRIVATE ${networks_dir})
  target_link_libraries(check_${check} PRIVATE loft_core loft_options)
  add_dependencies(check_${check} loft_networks)
endforeach()
if(LOFT_SANITIZE)  # the plain form, compared with at each coordinate, took two thirds of the time
  target_compile_options(check_cpu PRIVATE -O2)
else()  # 55 s to compile in place of 132, on one core, and 5 s to run either way
  target_compile_options(check_device PRIVATE -O1)
endif()
