# What metal_ext links on Linux in the place of Metal and of MLX's Metal side: the fake Metal of
# tests/metal/fake, kernels that run on the CPU, and a model of MLX's encoder. And `_standin`, through
# which tests in Python reach it. Included by metal_ext/metal.cmake.
#
#   QUIRE_KERNELS   kernels.so of tests/metal/msl

set(graph ${CMAKE_CURRENT_LIST_DIR})
set(metal_tests ${graph}/..)

file(GLOB fake_metal CONFIGURE_DEPENDS ${metal_tests}/fake/*.cpp)
add_library(standin SHARED ${fake_metal}
  ${graph}/accesses.cpp ${graph}/encode.cpp ${graph}/mlx_device.cpp ${graph}/mlx_encoder.cpp
  ${graph}/mlx_model.cpp ${graph}/model_objects.cpp ${graph}/on_device.cpp ${graph}/recorder.cpp
  ${graph}/stream_work.cpp ${graph}/timeline.cpp)
set_target_properties(standin PROPERTIES CXX_VISIBILITY_PRESET default)
target_include_directories(standin PUBLIC ${graph} ${metal_tests} csrc kernels)
target_include_directories(standin SYSTEM PUBLIC ${metal_tests}/fake/apple ${QUIRE_METAL_CPP})
# MLX's headers use std::bind, which is deprecated in parts.
target_compile_options(standin
  PUBLIC -fblocks -Wno-deprecated-declarations PRIVATE -Wall -Wextra)
add_library(kernels_of_texts SHARED IMPORTED)
set_target_properties(kernels_of_texts PROPERTIES IMPORTED_LOCATION ${QUIRE_KERNELS})
target_link_libraries(standin PUBLIC mlx kernels_of_texts)

# metal-cpp and MLX are most of what the compiler reads. One file says itself how metal-cpp is read.
target_precompile_headers(quire_core PRIVATE <Metal/Metal.hpp>)
target_precompile_headers(standin PRIVATE <Metal/Metal.hpp> <mlx/array.h> <mlx/primitives.h>)
target_precompile_headers(_ext PRIVATE <Metal/Metal.hpp> <mlx/array.h> <mlx/primitives.h>)
set_source_files_properties(
  ${metal_tests}/fake/metal_cpp.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

# Both find it where it was built.
set(CMAKE_BUILD_WITH_INSTALL_RPATH OFF)
target_link_libraries(quire_core PRIVATE standin)
target_link_libraries(_ext PRIVATE standin)

# What a runner's GPU is asked of every kernel, asked of the fake one.
add_executable(pipelines ${metal_tests}/hosted/pipelines.cpp)
target_link_libraries(pipelines PRIVATE quire_core standin)
target_compile_definitions(pipelines PRIVATE __MAC_OS_X_VERSION_MIN_REQUIRED=140000)

nanobind_add_module(_standin NB_STATIC NB_DOMAIN mlx ${graph}/module.cpp)
target_link_libraries(_standin PRIVATE standin)

include(${metal_tests}/darwin/mac_memory.cmake)

# The CPU's kernels are slow to compile as they are for users, and are tested elsewhere.
foreach(set amx bf16 vnni avx512 avx2 sse2 dotprod neon)
  if(TARGET kernels_${set})
    get_target_property(options kernels_${set} COMPILE_OPTIONS)
    list(TRANSFORM options REPLACE "^-O3$" "-O0")
    set_target_properties(kernels_${set} PROPERTIES COMPILE_OPTIONS "${options}")
  endif()
endforeach()
