"""Mistakes that the tests of the kernels must see, as changes of the true texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``old`` stands once in the text of ``file``. rung: small, asan or races must see it."""

    file: str
    what: str
    old: str
    new: str
    rung: str = "small"


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTATIONS = (
    Mutation(
        "decode",
        "keys behind the end are loaded",
        "const uint token = min(first + i * kStep, split.tokens - 1);",
        "const uint token = first + i * kStep;",
    ),
    Mutation(
        "decode",
        "values behind the end are loaded",
        "const uint token = min(start + i * kStep, split.tokens - 1);",
        "const uint token = start + i * kStep;",
    ),
    Mutation(
        "decode", "one position too many", "row.position + 1 - first", "row.position + 2 - first"
    ),
    Mutation(
        "decode",
        "the row's own position is left out",
        "row.position + 1 - first",
        "max(1u, row.position - first)",
    ),
    Mutation(
        "decode",
        "query heads take the wrong KV head",
        "const uint kv_head = tile_of_all / tiles;",
        "const uint kv_head = tile_of_all % arguments.kv_heads;",
    ),
    Mutation(
        "decode",
        "the first row is always the table's",
        "rows[arguments.first_row + task.row]",
        "rows[task.row]",
    ),
    Mutation(
        "decode",
        "the last tile writes heads of the next KV head",
        "const uint heads = min(uint(kTileHeads), group - in_group);",
        "const uint heads = kTileHeads;",
    ),
    Mutation(
        "decode",
        "logits are not scaled",
        "float(queries[h * D + dim]) * arguments.scale",
        "float(queries[h * D + dim])",
    ),
    Mutation(
        "decode",
        "two lanes of a pair share out the heads alike",
        "const bool upper = (part & 2) != 0;",
        "const bool upper = (part & 1) != 0;",
    ),
    Mutation(
        "decode",
        "weights are kept in half",
        "scores[token] = weight;",
        "scores[token] = float4(float(half(weight.x)), float(half(weight.y)), "
        "float(half(weight.z)), float(half(weight.w)));",
    ),
    Mutation(
        "decode",
        "the largest score is not taken off",
        "scores[token] - result.highest;",
        "scores[token];",
    ),
    Mutation(
        "decode",
        "scores of other simdgroups are read too early",
        f"(scores));\n  {BARRIER}",
        "(scores));",
    ),
    Mutation(
        "decode",
        "a maximum over some lanes only",
        "    highest[h] = simd_max(highest[h]);",
        "    if (thread_index < tokens) {\n      highest[h] = simd_max(highest[h]);\n    }",
    ),
    Mutation(
        "decode",
        "a barrier that not all simdgroups come to",
        f"    {BARRIER}\n    if (simdgroup < receivers) {{",
        f"    if (simdgroup < receivers) {{\n      {BARRIER}",
    ),
    Mutation(
        "decode",
        "splits of all rows share one result",
        "ulong(group.y) * arguments.query_heads + split.head",
        "ulong(task.row) * arguments.query_heads + split.head",
    ),
    Mutation(
        "decode",
        "too little threadgroup memory for the sums",
        "shared_sums[kDecodeSimdgroups / 2 * D]",
        "shared_sums[kDecodeSimdgroups / 2 * D - 1]",
        "asan",
    ),
    Mutation(
        "decode",
        "sums are overwritten before they are read",
        f"sum[i] += place[i * 32];\n      }}\n    }}\n    {BARRIER}",
        "sum[i] += place[i * 32];\n      }\n    }",
        "races",
    ),
    Mutation(
        "decode",
        "a barrier that orders no memory",
        f"    {BARRIER}\n    if (simdgroup < receivers) {{",
        "    threadgroup_barrier(mem_flags::mem_none);\n    if (simdgroup < receivers) {",
        "races",
    ),
    Mutation(
        "decode",
        "all lanes write the threadgroup's maximum",
        "  if (lane == 0) {\n    shared[simdgroup] = highest;\n  }",
        "  shared[0] = highest;",
        "races",
    ),
    Mutation(
        "combine", "splits are not brought to one scale", "precise::exp(split.x - highest)", "1.0f"
    ),
    Mutation(
        "combine", "the last split is left out", "task < end; ++task", "task + 1 < end; ++task"
    ),
    Mutation(
        "combine",
        "weights are added up unscaled",
        "total = fma(factor, split.y, total);",
        "total += split.y;",
    ),
    Mutation(
        "decode",
        "paged: a block begins one token early",
        "(token >> place.block_shift)]",
        "((token + 1) >> place.block_shift)]",
    ),
    Mutation(
        "gather",
        "paged: a block has half its tokens",
        "((1u << place.block_shift) - 1)",
        "((1u << (place.block_shift - 1)) - 1)",
    ),
    Mutation(
        "decode",
        "rows of any length are cut alike",
        "const uint most = split_tokens(row.position);",
        "const uint most = kShortSplitTokens;",
    ),
    Mutation(
        "decode",
        "rows of one split wait for another kernel",
        "split_count(split.row.position) == 1;",
        "false;",
    ),
    Mutation(
        "decode",
        "rows of several splits have the result of one",
        "split_count(split.row.position) == 1;",
        "true;",
    ),
    Mutation(
        "decode",
        "the result of one split is not divided by its weights",
        "sum[i][h] / soft.total[h]",
        "sum[i][h]",
    ),
    Mutation(
        "decode",
        "the result of one split goes where its task is",
        "out + (first_query + h) * D",
        "out + (first_result + h) * D",
    ),
    Mutation(
        "combine",
        "rows of one split are combined, from nothing",
        "if (end - first == 1) {",
        "if (false) {",
    ),
    Mutation(
        "gather",
        "paged: the sequence's own pages are not looked up",
        "space.pages[row.first_page + ",
        "space.pages[",
    ),
    Mutation("gather", "rows of the table's first sequence", "rows[arguments.row]", "rows[0]"),
    Mutation(
        "append", "V goes where K goes", "place, place.value_offset,", "place, place.key_offset,"
    ),
    Mutation("append", "rows behind the last are written", "|| at.y >= arguments.rows", ""),
    Mutation(
        "append",
        "arrays must begin at multiples of 16 bytes",
        "as_floats(keys + source)",
        "float4(load<4>(keys + source))",
        "asan",
    ),
    Mutation("project", "it turns the other way", "x * cosine - y * sine", "x * cosine + y * sine"),
    Mutation("project", "eps is forgotten", " + arguments.eps", ""),
    Mutation(
        "project",
        "K is weighted as q is",
        "is_query ? query_weight : key_weight",
        "is_query ? query_weight : query_weight",
    ),
    Mutation(
        "project",
        "a pair turns as its neighbour does",
        "arguments.frequencies[first + i]",
        "arguments.frequencies[first]",
    ),
    Mutation("project", "all heads take a norm", "arguments.normed != 0", "true"),
    Mutation("project", "all dimensions turn", "if (first + i < turned)", "if (true)"),
    Mutation(
        "project",
        "what turns lies half a head apart",
        "turns ? turned + first + i",
        "turns ? kHalf + first + i",
    ),
    Mutation(
        "project",
        "sines are not as large as cosines",
        "precise::sin(angle) * arguments.magnitude",
        "precise::sin(angle)",
    ),
    Mutation("delta", "the tail is forgotten", "} else if (has_tail) {", "} else if (false) {"),
    Mutation(
        "delta",
        "value heads take key heads in turn",
        "head / (arguments.value_heads / arguments.key_heads)",
        "head % arguments.key_heads",
    ),
    Mutation(
        "delta",
        "what is recalled has not decayed",
        "recalled = fma(state[r][i], key[i], recalled);",
        "recalled = fma(state[r][i] / decay, key[i], recalled);",
    ),
    Mutation(
        "delta",
        "a cell is read where there is none",
        "reads ? reinterpret_cast",
        "true ? reinterpret_cast",
    ),
    Mutation(
        "delta", "writes on the way are left out", "++next_write;\n    }\n  }\n}", "}\n  }\n}"
    ),
    Mutation(
        "delta",
        "a tail is not shifted",
        "tail[ulong(place) * width + at.x]",
        "tail[ulong(i) * width + at.x]",
    ),
    Mutation(
        "delta",
        "queries are as long as keys",
        "lane, precise::rsqrt(float(D)), query",
        "lane, 1.0f, query",
    ),
    Mutation("delta", "the gate is left out", " * silu(float(z[at])))", ")"),
    Mutation("swiglu", "up is left out", " * float(up[element])", ""),
    Mutation("swiglu", "the gate is not its own weight", "x / (1.0f", "1.0f / (1.0f"),
    Mutation("swiglu", "the gate opens the other way", "exp(-x)", "exp(x)"),
    Mutation(
        "swiglu",
        "the gate is rounded before it meets what it lets through",
        "x / (1.0f + precise::exp(-x)) *",
        "float(static_cast<T>(x / (1.0f + precise::exp(-x)))) *",
    ),
    Mutation("swiglu", "elements behind the last are written", "if (element < elements)", ""),
    Mutation(
        "blocks",
        "the source's regions lie as far apart as the target's",
        "at.y * arguments.source_stride",
        "at.y * arguments.target_stride",
    ),
)
