# Builds Horovod 0.28.1 against a torch whose headers need C++20, with nothing of Horovod's source
# changed. CMake reads this file through the environment variable CMAKE_TOOLCHAIN_FILE; it only
# names the file that runs right after `project(horovod)`, when the compiler is known.
set(CMAKE_PROJECT_horovod_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/standard.cmake")
