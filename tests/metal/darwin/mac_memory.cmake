# The extension once more, as _ext_mac: what stands on shared memory is compiled as for systems other
# than Linux, and a Mac's POSIX heaps are made of it. Included by ../graph/standins.cmake.

add_library(mac_memory OBJECT
  csrc/core/address_range.cpp csrc/core/heap.cpp csrc/core/mapper.cpp csrc/core/posix_memory.cpp)
target_include_directories(mac_memory PRIVATE csrc kernels)
target_compile_options(mac_memory PRIVATE -U__linux__)
set_target_properties(mac_memory PROPERTIES
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)

# What is linked before quire_core is not taken from there.
add_library(_ext_mac MODULE $<TARGET_OBJECTS:_ext> $<TARGET_OBJECTS:mac_memory>)
target_link_libraries(_ext_mac PRIVATE $<TARGET_PROPERTY:_ext,LINK_LIBRARIES>)
set_target_properties(_ext_mac PROPERTIES PREFIX "" LINKER_LANGUAGE CXX)
