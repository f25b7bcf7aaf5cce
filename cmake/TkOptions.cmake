# What every target is compiled with: link tk_options.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_library(tk_options INTERFACE)
target_compile_options(tk_options INTERFACE -Wall -Wextra -Wpedantic)
# Messages of failed checks name files: as in the repository, not as on the machine that built them.
add_compile_options(-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=)
if(TK_SANITIZE)
  # -O1 -g1: half the compile time of -O2 -g, and reports still have lines.
  set(flags -fsanitize=${TK_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  # Directory-wide, not through tk_options: an object that lacks the flags makes the others' reports wrong.
  add_compile_options(${flags})
  add_link_options(${flags})
endif()
