# Writes a C++ file with the texts of this folder (csrc/core/metal/kernel_text.h):
#   cmake -DOUTPUT=kernel_texts.cpp -P embed.cmake

file(GLOB paths LIST_DIRECTORIES false "${CMAKE_CURRENT_LIST_DIR}/*.h"
  "${CMAKE_CURRENT_LIST_DIR}/*.metal")
list(SORT paths)
set(content "#include \"core/metal/kernel_text.h\"\n\n#include <stdexcept>\n\n")
string(APPEND content "namespace quire::metal {\n\n")
string(APPEND content "std::string_view embedded_text(std::string_view file) {\n")
foreach(path IN LISTS paths)
  get_filename_component(name "${path}" NAME)
  file(READ "${path}" text)
  string(APPEND content
    "  if (file == \"${name}\") {\n    return R\"metal(${text})metal\";\n  }\n")
endforeach()
string(APPEND content
  "  throw std::logic_error(\"no kernel text is called \" + std::string(file));\n}\n\n")
string(APPEND content "}  // namespace quire::metal\n")

# Unchanged texts keep the file's time, so that nothing is compiled again.
set(before "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" before)
endif()
if(NOT content STREQUAL before)
  file(WRITE "${OUTPUT}" "${content}")
endif()
