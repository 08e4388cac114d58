# Horovod asks for C++14 (CMakeLists.txt, horovod/torch/CMakeLists.txt), torch >= 2.11 for C++20.
# Turning the flags that those standards stand for into C++20's reaches every target of the project,
# Gloo included, so that all of one library is compiled to one standard.
foreach(standard 11 14 17)
  set(CMAKE_CXX${standard}_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX${standard}_EXTENSION_COMPILE_OPTION "-std=gnu++20")
endforeach()

# Horovod enables CUDA wherever CMake finds a toolkit, also for a torch without it, and fails where
# that toolkit does not work. The set-up tries the toolkit first and says 0 where there is none to
# use; FindPytorch.cmake then tells Horovod that torch has no CUDA either.
if("$ENV{LOFT_HVD_HOROVOD_CUDA}" STREQUAL "0")
  set(CMAKE_CUDA_COMPILER "" CACHE FILEPATH "no CUDA wanted" FORCE)
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit TRUE)
endif()

# Horovod appends its own folder of modules to this list, so our FindPytorch.cmake comes first.
set(CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")

# --- compile time: 170 s of CPU instead of 455 s (g++ 12, Gloo and MPI, getrusage of each compiler)
# Without -g, which nobody debugs with here; Horovod itself turns this -O2 into -O3.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")

# Have files of the target compiled as one: most of a file's time goes into the headers it shares
# with the others, all of torch's or Horovod's controller with Eigen.
function(loft_unite target group folder)
  list(TRANSFORM ARGN PREPEND "${PROJECT_SOURCE_DIR}/${folder}/")
  list(TRANSFORM ARGN APPEND ".cc")
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
endfunction()

function(loft_speed_up)
  if(TARGET pytorch)
    loft_unite(pytorch torch horovod/torch
               mpi_ops_v2 adapter_v2 ready_event cuda_util handle_manager)
    loft_unite(pytorch control horovod/common
               controller process_set response_cache parameter_manager mpi/mpi_controller
               mpi/mpi_context gloo/gloo_controller)
    loft_unite(pytorch operations horovod/common/ops
               collective_operations operation_manager mpi_operations adasum_mpi_operations
               adasum/adasum_mpi)
    loft_unite(pytorch store horovod/common/gloo gloo_context http_store memory_store)
    loft_unite(pytorch small horovod/common
               common fusion_buffer_manager group_table half logging message stall_inspector
               tensor_queue thread_pool timeline utils/env_parser)
    set_target_properties(pytorch PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    # These take and hand on tensors, or tune once a minute: no loops over values, so -O1 does, at
    # half the time. All arithmetic on gradients keeps -O3.
    get_target_property(folder pytorch BINARY_DIR)
    set(slow "${folder}/CMakeFiles/pytorch.dir/Unity/unity_torch_cxx.cxx")
    foreach(name bayesian_optimization gaussian_process)
      list(APPEND slow "${PROJECT_SOURCE_DIR}/horovod/common/optim/${name}.cc")
    endforeach()
    set_source_files_properties(${slow} TARGET_DIRECTORY pytorch PROPERTIES COMPILE_OPTIONS "-O1")
  endif()
  # CUDA's kernels once more with the C++ ABI of old torches: built only where something links it.
  if(TARGET compatible_horovod_cuda_kernels)
    set_target_properties(compatible_horovod_cuda_kernels PROPERTIES EXCLUDE_FROM_ALL TRUE)
  endif()
  if(TARGET gloo)
    set(gloo third_party/gloo/gloo)
    foreach(folder transport transport/tcp rendezvous common)
      file(GLOB files RELATIVE "${PROJECT_SOURCE_DIR}/${gloo}"
           "${PROJECT_SOURCE_DIR}/${gloo}/${folder}/*.cc")
      list(TRANSFORM files REPLACE "[.]cc$" "")
      string(REPLACE "/" "_" group ${folder})
      loft_unite(gloo ${group} ${gloo} ${files})
    endforeach()
    # Not allreduce, allreduce_local and reduce: each declares a ReductionFunction of its own.
    loft_unite(gloo collectives ${gloo}
               allgather allgatherv alltoall alltoallv barrier broadcast gather gatherv scatter
               algorithm context types)
    set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  endif()
endfunction()

if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
  cmake_language(DEFER CALL loft_speed_up)  # the targets do not exist yet
endif()
