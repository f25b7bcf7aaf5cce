# The packs, as a target: rebuilt when a kernel, a tuned table or the compiler's driver changes. Launches that were
# compiled before come from tk's cache, so that even then only the changed ones are compiled.
set(TK_PACK_DIR ${CMAKE_BINARY_DIR}/packs)
set(TK_ROOTS_INC ${CMAKE_BINARY_DIR}/roots.inc CACHE FILEPATH "Hashes of the packs that libtk_core trusts as its own" FORCE)

string(REPLACE "," ";" archs "${TK_ARCHS}")
set(TK_PACK_FILES ${TK_PACK_DIR}/ops.tkpack)  # the package's generated ops, for machines without a GPU
foreach(arch IN LISTS archs)
  if(arch MATCHES "^[0-9]")
    set(arch sm${arch})
  endif()
  list(APPEND TK_PACK_FILES ${TK_PACK_DIR}/${arch}.tkpack)
endforeach()

file(GLOB_RECURSE pack_sources CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/kernels/*.py ${CMAKE_SOURCE_DIR}/kernels/*.json ${CMAKE_SOURCE_DIR}/python/tk/aot/*.py
  ${CMAKE_SOURCE_DIR}/python/tk/build/*.py ${CMAKE_SOURCE_DIR}/python/tk/codegen/*.py
  ${CMAKE_SOURCE_DIR}/python/tk/generated/*.py
  ${CMAKE_SOURCE_DIR}/python/tk/expr.py)
set(grid_options)
if(TK_GRID STREQUAL "sample")
  list(APPEND grid_options --sample)
elseif(NOT TK_GRID STREQUAL "full")
  message(FATAL_ERROR "TK_GRID is ${TK_GRID}; it can be full or sample")
endif()
if(TK_ONLY)
  list(APPEND grid_options --only ${TK_ONLY})
endif()

add_custom_command(
  OUTPUT ${TK_PACK_FILES} ${TK_ROOTS_INC}
  COMMAND ${CMAKE_COMMAND} -E env TK_NO_LIBRARY=1 PYTHONPATH=${CMAKE_SOURCE_DIR}/python PYTHONDONTWRITEBYTECODE=1
          ${Python_EXECUTABLE} -m tk.build --arch ${TK_ARCHS} --out ${TK_PACK_DIR} --roots ${TK_ROOTS_INC} ${grid_options}
  DEPENDS ${pack_sources}
  COMMENT "Compiling the kernels (${TK_GRID} grid, ${TK_ARCHS})"
  USES_TERMINAL VERBATIM)
add_custom_target(tk_packs ALL DEPENDS ${TK_PACK_FILES} ${TK_ROOTS_INC})
