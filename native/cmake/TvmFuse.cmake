# tvm_fuse_add_network(NAME BUNDLE folder [IMAGE file])
#
# Adds the static library NAME: the network of a bundle as C functions, declared in NAME.h, with its machine code
# and weights inside. IMAGE stands in for the bundle's machine code, as for the emulator.
function(tvm_fuse_add_network name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "BUNDLE;IMAGE" "")
  if(NOT arg_BUNDLE OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tvm_fuse_add_network(${name}): wanted BUNDLE folder [IMAGE file], got: ${ARGN}")
  endif()
  get_filename_component(bundle "${arg_BUNDLE}" ABSOLUTE)
  if(NOT EXISTS "${bundle}/bundle.json")
    message(FATAL_ERROR "tvm_fuse_add_network(${name}): no bundle.json in ${bundle}; "
      "`tvm-fuse export MODEL -o BUNDLE` writes a bundle")
  endif()
  file(GLOB files CONFIGURE_DEPENDS "${bundle}/*")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/${name}_network")
  file(MAKE_DIRECTORY "${folder}")

  # The assembler reads the files; when one changes, the code is written and compiled again.
  add_custom_command(
    OUTPUT "${folder}/${name}.cpp" "${folder}/${name}.h"
    COMMAND tvm-fuse-embed "${name}" "${bundle}" "${folder}" ${arg_IMAGE}
    DEPENDS tvm-fuse-embed ${files} ${arg_IMAGE}
    COMMENT "Embedding ${bundle} as ${name}"
    VERBATIM)
  add_library(${name} STATIC "${folder}/${name}.cpp" "${folder}/${name}.h" $<TARGET_OBJECTS:tvm_fuse_core>)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${name} PUBLIC "${folder}")
  target_include_directories(${name} PRIVATE
    $<TARGET_PROPERTY:tvm_fuse_core,INTERFACE_INCLUDE_DIRECTORIES>)
  target_link_libraries(${name} PRIVATE tvm_fuse_options PUBLIC ${CMAKE_DL_LIBS})
endfunction()
