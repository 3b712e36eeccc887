"""What the operations refuse, in which words, and that nothing is written before they do."""

from typing import Any

import mlx.core as mx
import pytest

from metal_ext import CpuWorkers, Layer, PackedExperts, PackedLinear
from tests.metal_ext.arguments import Setting

SETTING = Setting()
WORKERS = CpuWorkers(1)
WEIGHT, OTHER = mx.ones((32,)), mx.ones((16,))
HALF, BRAIN = mx.float16, mx.bfloat16


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


def both(x: mx.array) -> dict[str, Any]:
    return {"keys": x, "values": x}


def kept_as(dtype: mx.Dtype) -> dict[str, Any]:
    return {"layer": Layer(0, 1, dtype)}


def packed(*shape: int) -> PackedLinear:
    return PackedLinear([mx.ones(shape)], WORKERS, [])


def stacked(*shape: int) -> PackedExperts:
    return PackedExperts([mx.ones(shape)], WORKERS, [])


Row = tuple[str, dict[str, Any], str]
APPENDED: list[Row] = [
    ("append", both(zeros(1, 2, 32)), "keys has 1 rows; the row table has 2"),
    ("append", both(zeros(3, 2, 32)), "keys has 3 rows; the row table has 2"),
    ("append", both(zeros(0, 2, 32)), "keys has 0 rows; the row table has 2"),
    ("append", {"keys": zeros(2, 64)}, "keys has 2 dimensions"),
    ("append", {"values": zeros(1, 2, 2, 32)}, "values has 4 dimensions"),
    ("append", {"values": zeros(2, 1, 64)}, "keys and values have different shapes"),
    ("append", both(zeros(2, 1, 32)), "region 0 has rows of 256 bytes"),
    ("append", both(zeros(2, 4, 16)), "head_dim is 16"),
    ("append", both(zeros(2, 2, 0)), "head_dim is 0"),
    *(
        ("append", {name: zeros(2, 2, 32, dtype=dtype)}, f"{name} must be float32 or bfloat16")
        for name in ("keys", "values")
        for dtype in (HALF, mx.int32, mx.uint16, mx.complex64, mx.bool_)
    ),
    ("append", kept_as(BRAIN), "these heads need 128"),
    ("append", kept_as(HALF), "keeps K and V as bfloat16 or float32"),
    ("project_append", {"queries": zeros(1, 2, 32)}, "queries has 1 rows"),
    ("project_append", {"queries": zeros(0, 2, 32)}, "queries has 0 rows"),
    ("project_append", both(zeros(1, 2, 32)), "keys has 1 rows"),
    ("project_append", {"values": zeros(1, 2, 32)}, "different shapes"),
    ("project_append", {"queries": zeros(2, 64)}, "queries has 2 dimensions"),
    ("project_append", {"queries": zeros(2, 2, 32, dtype=HALF)}, "queries must be float32 or bfl"),
    ("project_append", {"queries": zeros(2, 2, 16)}, "a different head_dim"),
    ("project_append", {"queries": zeros(2, 3, 32)}, "cannot share 2 KV heads evenly"),
    ("project_append", both(zeros(2, 1, 32)), "region 0 has rows of 256"),
    (
        "project_append",
        both(zeros(2, 2, 30)) | {"queries": zeros(2, 2, 30)},
        "head_dim is 30",
    ),
    *(
        ("project_append", {"norms": (weight, WEIGHT, 1e-6)}, r"q_weight must be \[32\] float32")
        for weight in (mx.ones((64,)), mx.ones((1, 32)), mx.ones((32,), BRAIN))
    ),
    *(
        ("project_append", {"norms": (WEIGHT, weight, 1e-6)}, r"k_weight must be \[32\] float32")
        for weight in (OTHER, mx.ones((32,), HALF))
    ),
    *(
        ("project_append", {"angles": angles}, "angles do not")
        for angles in (zeros(1, 32), zeros(2, 15), zeros(2, 32, dtype=BRAIN))
    ),
    ("project_append", kept_as(BRAIN), "these heads need 128"),
    ("project_append", kept_as(HALF), "keeps K and V as bfloat16 or float32"),
]
READ: list[Row] = [
    (attention, changes, message)
    for attention in ("decode_attention", "chunk_attention")
    for changes, message in (
        ({"queries": zeros(2, 3, 32)}, "3 query heads cannot share 2 KV heads evenly"),
        ({"queries": zeros(2, 2, 96)}, "head_dim is 96; the CPU kernels are built for"),
        ({"queries": zeros(2, 2, 0)}, "head_dim is 0"),
        ({"queries": zeros(2, 2, 64)}, "region 0 has rows of 256 bytes"),
        ({"kv_heads": 1}, "these heads need 128"),
        ({"queries": zeros(2, 64)}, "queries has 2 dimensions"),
        ({"queries": zeros(1, 2, 2, 32)}, "queries has 4 dimensions"),
        ({"queries": zeros(2, 2, 32, dtype=HALF)}, "queries must be float32 or bfloat16"),
        ({"queries": zeros(2, 2, 32, dtype=mx.int32)}, "queries must be float32 or bfloat16"),
        ({"queries": zeros(2, 2, 32, dtype=mx.complex64)}, "queries must be float32 or bfloat16"),
        (kept_as(HALF), "keeps K and V as bfloat16 or float32"),
        (kept_as(mx.int32), "keeps K and V as bfloat16 or float32"),
    )
]
READ += [
    ("chunk_attention", {"queries": zeros(count, 2, 32)}, f"queries has {count} rows; segment 0")
    for count in (0, 1, 3)
]
ROWS, NORM = "x must be float32 rows of 32", "a norm's weight must be 32 float32 numbers"
WRONG_ROWS = (zeros(32), zeros(0, 32), zeros(2, 31), zeros(2, 2, 32), zeros(2, 32, dtype=BRAIN))
WRONG_NORMS = (OTHER, mx.ones((1, 32)), mx.ones((32,), BRAIN))
UNFIT_MLP = "gate, up and down do not fit each other"
UNFIT_EXPERT, UNFIT_ROUTER = "an expert's gate, up and down do not fit", "router and experts do not"
UNLIKE = "of as many experts each"
DENSE = packed(64, 32), packed(32, 32)
BIASES = SETTING.calls["mixture_mlp"][1]["biases"]
DELTA = {name: SETTING.calls["gated_delta"][1][name] for name in ("qkv", "z", "a", "b")}
MULTIPLIED: list[Row] = [
    *(("linear", {"x": x}, ROWS) for x in WRONG_ROWS),
    *(("linear", {"norm": norm}, NORM) for norm in WRONG_NORMS),
    ("linear", {"residual": zeros(2, 32)}, "the residual must be float32 rows of 64 numbers"),
    ("linear", {"residual": zeros(2, 64, dtype=BRAIN)}, "the residual must be float32 rows"),
    ("linear", {"residual": zeros(3, 64)}, "x and the residual have a different number of rows"),
    ("linear_heads", {"heads": []}, "heads do not fit the layer's outputs"),
    ("linear_heads", {"heads": [2, 1]}, "heads do not fit the layer's outputs"),
    ("gated_mlp", {"gate_up": packed(32, 32)}, UNFIT_MLP),
    ("gated_mlp", {"down": packed(16, 32)}, UNFIT_MLP),
    ("gated_mlp", {"x": zeros(2, 16)}, ROWS),
    ("gated_mlp", {"norm": OTHER}, NORM),
    ("gated_mlp", {"gate": "relu"}, "a gate is silu, gelu_tanh or clamped_silu, not 'relu'"),
    ("mixture_mlp", {"shared": DENSE, "router": packed(4, 32)}, "a shared expert has no biases"),
    (
        "mixture_mlp",
        {"biases": (zeros(2), *BIASES[1:])},
        r"the router's bias must be \[3\] float32",
    ),
    ("mixture_mlp", {"biases": (*BIASES[:2], zeros(3, 64))}, r"bias of down must be \[3, 32\]"),
    ("rms_norm", {"residual": zeros(1, 32)}, "x and the residual have a different number of rows"),
    ("rms_norm", {"weight": OTHER}, "x must be float32 rows of 16 numbers"),
    ("rms_norm", {"weight": mx.ones((1, 32))}, NORM),
    ("rms_norm", {"x": zeros(2, 32, dtype=BRAIN)}, ROWS),
    ("mixture_mlp", {"x": zeros(2, 33)}, ROWS),
    ("mixture_mlp", {"norm": OTHER}, NORM),
    ("mixture_mlp", {"router": packed(4, 32)}, UNFIT_ROUTER),
    ("mixture_mlp", {"shared": DENSE}, UNFIT_ROUTER),
    ("mixture_mlp", {"down": stacked(2, 32, 32)}, UNFIT_ROUTER),
    ("mixture_mlp", {"gate_up": stacked(3, 32, 32)}, UNFIT_EXPERT),
    ("mixture_mlp", {"router": packed(4, 32), "shared": DENSE[::-1]}, UNFIT_EXPERT),
    ("PackedExperts", {"weights": [], "codes": []}, "it has no weights"),
    ("PackedExperts", {"weights": [zeros(3, 4)], "codes": []}, "are not .experts, outputs"),
    ("PackedExperts", {"weights": [zeros(0, 3, 4)], "codes": []}, "are not .experts, outputs"),
    ("PackedExperts", {"weights": [zeros(3, 4, 32), zeros(2, 4, 32)], "codes": []}, UNLIKE),
    ("PackedExperts", {"codes": [(zeros(2, 64, 1), zeros(2, 64, 1), 4, 32)]}, UNLIKE),
    *(
        ("gated_delta", {name: wrong}, rf"^{name} must be \[2, ")
        for name, x in DELTA.items()
        for wrong in (x[:1], x[:, :-1], x[None])
    ),
    *(
        ("gated_delta", {n: x.astype(BRAIN)}, "must be float32 on the CPU")
        for n, x in DELTA.items()
    ),
]
OUTSIDE: list[Row] = [
    ("append", both(zeros(2, 0, 32)), "heads is 0; it must lie between 1 and"),
    ("project_append", {"queries": zeros(2, 0, 32)}, "query_heads is 0"),
    ("project_append", both(zeros(2, 0, 32)), "kv_heads is 0"),
    *(
        ("decode_attention", {"queries": zeros(2, heads, 32)}, f"query_heads is {heads}; it must")
        for heads in (0, 257, 260)
    ),
    ("decode_attention", {"queries": zeros(4, 2, 32)}, "rows of the table"),
    ("decode_attention", {"queries": zeros(0, 2, 32)}, "rows of the table"),
    *(
        ("linear_heads", {"heads": heads}, "^heads is ")
        for heads in ([0, 4], [-1, 5], [65], [8, 57], [64, 1], [2**62, 2**62])
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), [*APPENDED, *READ, *MULTIPLIED])
def test_what_does_not_fit_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    function, arguments = SETTING.calls[name]
    with pytest.raises(ValueError, match=message):
        function(**(arguments | changes))
    assert SETTING.heap.committed_bytes == 0, "nothing is written"


@pytest.mark.parametrize(("name", "changes", "message"), OUTSIDE)
def test_there_are_neither_fewer_nor_more_than_kernels_have_room_for(
    name: str, changes: dict[str, Any], message: str
) -> None:
    function, arguments = SETTING.calls[name]
    with pytest.raises(IndexError, match=message):
        function(**(arguments | changes))
    assert SETTING.heap.committed_bytes == 0, "nothing is written"


def test_a_call_may_have_all_the_heads_that_there_is_room_for() -> None:
    assert SETTING.call("decode_attention(queries)", zeros(2, 256, 32)).shape == (2, 256, 32)
