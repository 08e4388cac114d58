# Horovod asks for C++14 (CMakeLists.txt, horovod/torch/CMakeLists.txt), torch >= 2.11 for C++20.
# Turning the flags that those standards stand for into C++20's reaches every target of the project,
# Gloo included, so that all of one library is compiled to one standard.
foreach(standard 11 14 17)
  set(CMAKE_CXX${standard}_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX${standard}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
endforeach()

# Horovod enables CUDA wherever CMake finds a toolkit, also for a torch without it, and fails where
# that toolkit does not work. The set-up asks for none where torch would use none.
if("$ENV{LOFT_HVD_HOROVOD_CUDA}" STREQUAL "0")
  set(CMAKE_CUDA_COMPILER "" CACHE FILEPATH "no CUDA wanted" FORCE)
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)
endif()
