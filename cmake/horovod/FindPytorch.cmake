# In place of Horovod's own module of this name, which starts Python eight times and imports torch
# each time (40 s on a busy machine with two cores). ask_torch.py answers everything at once, and
# answers that torch has no CUDA where LOFT_HVD_HOROVOD_CUDA is 0.
set(_answers "${CMAKE_CURRENT_BINARY_DIR}/torch.cmake")
execute_process(
  COMMAND ${PY_EXE} "${CMAKE_CURRENT_LIST_DIR}/ask_torch.py" "${_answers}"
  RESULT_VARIABLE _failed)
if(_failed EQUAL 0)
  include("${_answers}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_VERSION VERSION_VAR Pytorch_VERSION)
if(NOT PYTORCH_FOUND)
  return()
endif()
foreach(_library IN LISTS _Pytorch_LIBRARIES)
  find_library(FOUND_LIB_${_library} NAMES ${_library} HINTS ${Pytorch_LIBRARY_DIRS})
  list(APPEND Pytorch_LIBRARIES ${FOUND_LIB_${_library}})
endforeach()
