// How the host names kernels and puts their texts together (core/metal/kernel_text.h).
#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

#include "../../native/check.h"
#include "../msl/all_kernels.h"

using namespace quire::metal;
using quire::test::throws;

namespace {

size_t count_of(const std::string& part, const std::string& text) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

}  // namespace

TEST("a kernel is named after its types, its head_dim and its kind of rows") {
  const Kernel split = decode_split_kernel(Number::bfloat16, Number::float16, 128, 5, Kind::paged);
  CHECK(split.name == "decode_split_bfloat_half_128_6_paged");
  CHECK(split.file == "decode.metal");
  CHECK(split.expression == "decode_split<bfloat, half, 128, 6, Rows::paged>");
  CHECK(decode_combine_kernel(Number::float32, 64).expression == "decode_combine<float, 64>");
  CHECK(gather_kernel(Number::bfloat16, Kind::dense).name == "gather_bfloat_dense");
  const Kernel products = products_kernel(Number::bfloat16, Packing::affine4, 2);
  CHECK(products.name == "products_bfloat_affine4_2");
  CHECK(products.expression == "products<bfloat, Packing::affine4, 2>");
  CHECK(copy_blocks_kernel().name == "copy_blocks");
  CHECK(copy_blocks_kernel().expression.empty());
}

TEST("a group of heads takes the fewest tiles, and then the smallest") {
  const auto tiles = [](uint32_t group) {
    std::string name =
        decode_split_kernel(Number::float32, Number::float32, 64, group, Kind::dense).name;
    return name.substr(0, name.rfind('_')).substr(std::string("decode_split_float_float_64_").size());
  };
  for (uint32_t group : {1, 2, 3, 4}) {
    CHECK(tiles(group) == "4");
  }
  for (uint32_t group : {5, 6, 9, 10, 12}) {
    CHECK(tiles(group) == "6");
  }
  for (uint32_t group : {7, 8, 13, 16, 24, 71}) {
    CHECK(tiles(group) == "8");
  }
}

TEST("a head_dim that no kernel has is refused") {
  CHECK(throws<std::logic_error>("head_dim of 96", [] {
    decode_combine_kernel(Number::float32, 96);
  }));
}

TEST("the list of all kernels has every instance once") {
  std::set<std::string> names;
  std::string together;
  for (const Kernel& kernel : all_kernels()) {
    names.insert(kernel.name);
    together += " " + kernel.name;
  }
  CHECK(names.size() == all_kernels().size());
  CHECK(count_of(" decode_split_", together) == 3 * 3 * 3 * 3 * 3);
  CHECK(count_of(" project_append_", together) == 3 * 3 * 3 * 3);
  CHECK(count_of(" append_", together) == 3 * 3 * 3);
  CHECK(count_of(" decode_combine_", together) == 3 * 3);
  CHECK(count_of(" gather_", together) == 3 * 3);
  CHECK(count_of(" products_", together) == 3 * 4 * 3);
  CHECK(count_of(" gated_product_", together) == 3 * 4 * 3);
  CHECK(count_of("_blocks", together) == 2);
}

TEST("the embedded texts are the files") {
  for (const Kernel& kernel : all_kernels()) {
    std::ifstream file(std::string(QUIRE_KERNELS) + "/" + kernel.file);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    CHECK_CASE(!text.empty() && text == embedded_text(kernel.file), kernel.file);
  }
  CHECK(throws<std::logic_error>("missing.metal", [] { embedded_text("missing.metal"); }));
}

TEST("a library is one text: what it includes of ours, once, then itself, then the instances") {
  const std::string text = library_text(
      {gather_kernel(Number::float32, Kind::dense), gather_kernel(Number::float16, Kind::paged)});
  CHECK(count_of("#include \"", text) == 0);
  CHECK(count_of("#pragma once", text) == 0);
  CHECK(count_of("struct RowEntry {", text) == 1);
  CHECK(count_of("enum class Rows {", text) == 1);
  const size_t arguments = text.find("struct RowEntry {");
  const size_t rows = text.find("enum class Rows {");
  const size_t itself = text.find("void gather(");
  const size_t first = text.find(
      "\ntemplate [[host_name(\"gather_float_dense\")]] [[kernel]] "
      "decltype(gather<float, Rows::dense>) gather<float, Rows::dense>;\n");
  CHECK(arguments < rows && rows < itself && itself < first && first != text.npos);
  CHECK(text.find("gather_half_paged") > first && text.find("gather_half_paged") != text.npos);
}

TEST("kernels that are no templates need no instance") {
  const std::string text = library_text({zero_blocks_kernel(), copy_blocks_kernel()});
  CHECK(count_of("host_name", text) == 0);
  CHECK(count_of("void zero_blocks(", text) == 1);
}

TEST("kernels of two files are no library") {
  CHECK(throws<std::logic_error>("copy_blocks is not of gather.metal", [] {
    library_text({gather_kernel(Number::float32, Kind::dense), copy_blocks_kernel()});
  }));
}
