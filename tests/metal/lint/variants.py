"""Kernels that Metal's compiler would refuse, as changes of the true texts."""

from dataclasses import dataclass

DECODE = "decode_split_bfloat_half_128_6_paged"
APPEND = "append_half_bfloat_dense"
BLOCKS = "copy_blocks"
GATED = "gated_product_half_plain_1"


@dataclass(frozen=True)
class Variant:
    """``old`` stands exactly once in the kernel's text; ``new`` takes its place."""

    what: str
    kernel: str
    old: str
    new: str


VARIANTS = (
    Variant(
        "an array indexed by what is not constant",
        DECODE,
        "    if (simdgroup != 0 || h >= split.heads) {",
        "    h += lane / 32;\n    if (simdgroup != 0 || h >= split.heads) {",
    ),
    Variant(
        "a loop over an array that is not unrolled",
        DECODE,
        "  QUIRE_UNROLL\n  for (uint h = 0; h < H; ++h) {",
        "  for (uint h = 0; h < H; ++h) {",
    ),
    Variant(
        "device memory read as threadgroup memory",
        DECODE,
        "const device KV* value = ",
        "const threadgroup KV* value = ",
    ),
    Variant(
        "threadgroup memory read as device memory",
        DECODE,
        "const Part weight = weights[token",
        "const device Part* w = weights; const Part weight = w[token",
    ),
    Variant(
        "a pointer without address space",
        DECODE,
        "thread Piece* sum) {\n",
        "Piece* sum) {\n",
    ),
    Variant(
        "a local pointer without address space",
        APPEND,
        "  const ulong source = ",
        "  const T* unused_keys = nullptr;\n  (void)unused_keys;\n  const ulong source = ",
    ),
    Variant(
        "a reference without address space",
        APPEND,
        "const ulong source = ulong(at.y)",
        "const uint& up = element;\n  (void)up;\n  const ulong source = ulong(at.y)",
    ),
    Variant(
        "a write through const threadgroup",
        DECODE,
        "const Part weight = weights",
        "weights[token] = Part(0.0f); const Part weight = weights",
    ),
    Variant(
        "a write to constant arguments",
        APPEND,
        "const uint element = at.x * 4;",
        "const uint element = at.x * 4; arguments.rows = 1;",
    ),
    Variant("const cast away", BLOCKS, "*target = *source;", "*source = *target;"),
    Variant("a function of std", DECODE, "most[i] = simd_max(", "most[i] = std::abs("),
    Variant(
        "a function that Metal does not have",
        DECODE,
        "simd_max(most[i])",
        "simd_maximum(most[i])",
    ),
    Variant(
        "a variable without constant at the top",
        BLOCKS,
        "enum class Rows",
        "uint calls;\nenum class Rows",
    ),
    Variant(
        "a static variable",
        DECODE,
        "  float sum = scores[0];",
        "  static uint calls = 0;\n  float sum = scores[0];",
    ),
    Variant(
        "double",
        DECODE,
        "Part total = Part(0.0f);",
        "double zero = 0; Part total = Part(zero);",
    ),
    Variant("an exception", DECODE, "  Part result = totals", "  throw 1;\n  Part result = totals"),
    Variant(
        "new",
        DECODE,
        "  Part result = totals",
        "  thread uint* n = new uint;\n  Part result = totals",
    ),
    Variant("a virtual function", DECODE, "struct Split {", "struct Split {\n  virtual void f();"),
    Variant(
        "a number narrowed to bfloat without a cast",
        APPEND,
        "static_cast<T>(x[i])",
        "x[i]",
    ),
    Variant(
        "a product narrowed to half without a cast",
        GATED,
        "static_cast<T>(gated(arguments.gate, g, u))",
        "gated(arguments.gate, g, u)",
    ),
    Variant(
        "a write to what is only read",
        GATED,
        "multiply_tile<T, packing, R, 2>(",
        "x[0] = x[1]; multiply_tile<T, packing, R, 2>(",
    ),
    Variant(
        "a statement newer than C++14",
        APPEND,
        "if (kind == Rows::paged)",
        "if constexpr (kind == Rows::paged)",
    ),
)
