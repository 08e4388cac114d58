# The CUDA half, where it is wanted and there is an nvcc (12.1 or newer: the tables of row addresses
# are kernel parameters of more than 4 KiB). The CUDA runtime is linked statically, so the result
# also loads where there is no GPU. LOFT_CUDA:
#   auto  build it where nvcc is found and this machine has an NVIDIA GPU: it takes minutes
#   1     build it, or fail without nvcc: for machines that build for others
#   0     do not
function(loft_find_gpu found)
  file(GLOB devices /dev/nvidia[0-9]*)
  set(is_there OFF)
  if(devices OR EXISTS /dev/dxg)  # dxg: a GPU under WSL
    set(is_there ON)
  endif()
  set(${found} ${is_there} PARENT_SCOPE)
endfunction()

if(LOFT_CUDA STREQUAL "auto")
  loft_find_gpu(LOFT_HAVE_GPU)
  if(NOT LOFT_HAVE_GPU)
    message(STATUS "loft_hvd: no NVIDIA GPU here, building the CPU half only (LOFT_HVD_CUDA=1 builds "
                   "the CUDA half nevertheless)")
    return()
  endif()
elseif(NOT LOFT_CUDA STREQUAL "1")
  if(NOT LOFT_CUDA STREQUAL "0")
    message(FATAL_ERROR "LOFT_HVD_CUDA=${LOFT_CUDA}: it takes 0, 1 or auto")
  endif()
  message(STATUS "loft_hvd: LOFT_HVD_CUDA=0, building the CPU half only")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(LOFT_CUDA STREQUAL "1")
    message(FATAL_ERROR "LOFT_HVD_CUDA=1, but no nvcc was found; put it on PATH or set CUDACXX")
  endif()
  message(WARNING "loft_hvd: there is an NVIDIA GPU but no nvcc, building the CPU half only; put "
                  "nvcc (12.1 or newer) on PATH or set CUDACXX, and build again")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES ${LOFT_CUDA_ARCHS})
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
  message(FATAL_ERROR "loft_hvd: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old, 12.1 is needed; put a "
                      "newer one on PATH, set CUDACXX, or set LOFT_HVD_CUDA=0")
endif()
message(STATUS "loft_hvd: building the CUDA half with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for "
               "${LOFT_CUDA_ARCHS}")
set(compress -Xfatbin=-compress-all)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # a quarter smaller; drivers older than CUDA 12.4 cannot read it, those of CUDA 13 all can
  list(APPEND compress --compress-mode=size)
endif()
foreach(part IN ITEMS float32 float16 bfloat16 float64)
  foreach(file IN ITEMS launch rows)
    add_library(loft_cuda_${file}_${part} OBJECT csrc/cuda/${file}.cu)
    target_compile_definitions(loft_cuda_${file}_${part} PRIVATE LOFT_PART=${part})
    list(APPEND cuda_targets loft_cuda_${file}_${part})
  endforeach()
endforeach()
add_library(loft_cuda OBJECT csrc/cuda/launch.cu csrc/cuda/rows.cu)
list(APPEND cuda_targets loft_cuda)
foreach(target IN LISTS cuda_targets)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/csrc ${networks_dir})
  target_compile_options(${target} PRIVATE --fmad=false --expt-relaxed-constexpr ${compress})
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  add_dependencies(${target} loft_networks)
  target_sources(_loft PRIVATE $<TARGET_OBJECTS:${target}>)
endforeach()
target_compile_definitions(_loft PRIVATE LOFT_HAVE_CUDA)
find_package(CUDAToolkit REQUIRED)
target_link_libraries(_loft PRIVATE CUDA::cudart_static)
