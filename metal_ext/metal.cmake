# Adds the Metal backends, on metal-cpp, and their operations, on MLX's encoders.
# tests/metal/graph builds all of this without Metal: QUIRE_METAL_STANDINS names a file with
# replacements for Metal and for csrc/ops/metal/on_device.cpp.

set(QUIRE_METAL_CPP "${MLX_LIBRARY_DIRS}/../include/metal_cpp" CACHE PATH "metal-cpp's headers")
set(QUIRE_METAL_STANDINS "" CACHE FILEPATH "Only for tests")

file(GLOB kernel_texts CONFIGURE_DEPENDS kernels/metal/*.h kernels/metal/*.metal)
set(kernel_texts_cpp ${CMAKE_CURRENT_BINARY_DIR}/kernel_texts.cpp)
add_custom_command(
  OUTPUT ${kernel_texts_cpp}
  COMMAND ${CMAKE_COMMAND} -DOUTPUT=${kernel_texts_cpp}
    -P ${CMAKE_CURRENT_SOURCE_DIR}/kernels/metal/embed.cmake
  COMMAND ${CMAKE_COMMAND} -E touch ${kernel_texts_cpp}
  DEPENDS ${kernel_texts} kernels/metal/embed.cmake
  VERBATIM)

file(GLOB metal_core CONFIGURE_DEPENDS csrc/core/metal/*.cpp)
file(GLOB metal_ops CONFIGURE_DEPENDS csrc/ops/metal/*.cpp)
if(QUIRE_METAL_STANDINS)
  list(FILTER metal_ops EXCLUDE REGEX "/on_device.cpp$")
  include(${QUIRE_METAL_STANDINS})
else()
  # libmlx exports the one implementation of metal-cpp.
  target_link_libraries(_ext PRIVATE "-framework Metal" "-framework Foundation")
endif()

target_sources(quire_core PRIVATE ${metal_core} ${kernel_texts_cpp})
target_sources(_ext PRIVATE csrc/bindings_metal.cpp ${metal_ops})
target_compile_definitions(_ext PRIVATE QUIRE_METAL)
target_include_directories(quire_core SYSTEM PUBLIC ${QUIRE_METAL_CPP})
