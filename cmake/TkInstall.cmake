# The layout of the package tk: what lies where under the prefix. RPATHs are $ORIGIN (set by each target), so the folder
# can be moved as a whole.
include(CMakePackageConfigHelpers)

set(config_dir share/cmake/tk)
set_target_properties(tk_core PROPERTIES EXPORT_NAME core)
set_target_properties(tk_ops PROPERTIES EXPORT_NAME ops)
install(TARGETS tk_core tk_ops EXPORT tkTargets LIBRARY DESTINATION lib INCLUDES DESTINATION include)
install(DIRECTORY csrc/core/include/ csrc/ops/include/ DESTINATION include FILES_MATCHING PATTERN "*.h")
if(TK_PACKS)
  install(FILES ${TK_PACK_FILES} DESTINATION packs)
endif()

install(EXPORT tkTargets NAMESPACE tk:: DESTINATION ${config_dir})
configure_package_config_file(cmake/tkConfig.cmake.in ${CMAKE_BINARY_DIR}/tkConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tkConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tkConfig.cmake ${CMAKE_BINARY_DIR}/tkConfigVersion.cmake DESTINATION ${config_dir})
