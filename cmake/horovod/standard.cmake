# Horovod asks for C++14 (CMakeLists.txt, horovod/torch/CMakeLists.txt), torch >= 2.11 for C++20.
# Turning the flags that those standards stand for into C++20's reaches every target of the project,
# Gloo included, so that all of one library is compiled to one standard.
foreach(standard 11 14 17)
  set(CMAKE_CXX${standard}_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX${standard}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
endforeach()
