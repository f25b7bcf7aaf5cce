# Libraries that run on an older glibc and libstdc++ than this machine's: linked against stubs of the older ones
# (tools/link_stubs.py, which says how). What is linked so asks for nothing newer, or does not link.
set(TK_OLDEST_GLIBC "" CACHE STRING "The oldest glibc that the libraries run on, such as 2.28; empty: this machine's")

if(TK_OLDEST_GLIBC)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(TK_STUBS ${CMAKE_BINARY_DIR}/stubs)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/link_stubs.py ${TK_STUBS} --glibc ${TK_OLDEST_GLIBC}
            --compiler ${CMAKE_CXX_COMPILER}
    COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tools/link_stubs.py)
endif()

function(tk_for_oldest_glibc target)
  if(TK_OLDEST_GLIBC)
    target_sources(${target} PRIVATE ${CMAKE_SOURCE_DIR}/csrc/compat/glibc.c)
    # What the archives of libstdc++ bring stays inside.
    target_link_options(${target} PRIVATE -L${TK_STUBS} -Wl,--exclude-libs,ALL)
  endif()
endfunction()
