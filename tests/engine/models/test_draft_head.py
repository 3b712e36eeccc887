"""A draft head is found in every place and layout, and drafts as a reference in float32 does."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from engine.models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.models.mlx_ops import MlxOps
from engine.models.spec import Attention, DenseMlp, LayerSpec
from engine.models.weights import load_model
from kvcache.layout import KVFormat
from tests.draft_heads import head_arrays, write_companion, write_head
from tests.engine.models.forwards import cache_for, ours, prompt, spread
from tests.engine.models.hybrids import FIELDS, QWEN3_5_MOE, SPEC, write_bonsai, write_hybrid
from tests.families import GEMMA3, names_apart, names_fused
from tests.kvcache.managers import join
from tests.models import write_model
from tests.reference import load_reference

# Of the states' standard deviation: float32 in another order, through two drafts.
TOLERANCE = 3e-4
QWEN3 = {"model_type": "qwen3"}
WHICH = ("gate", "up", "down")
FAMILIES = pytest.mark.parametrize("fields", [FIELDS, QWEN3_5_MOE], ids=["dense", "moe"])
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
Plan = list[tuple[int, int, list[int]]]
"""(sequence, start, tokens) segments."""


class Drafting:
    """A model with a draft head over a cache of its own."""

    def __init__(self, checkpoint: Checkpoint, lengths: dict[int, int], **how: Any) -> None:
        """lengths: of each sequence, at most. how: as for ``ours``."""
        self.model, self.kv = ours(checkpoint, **how), cache_for(checkpoint, KVFormat.FLOAT32)
        for seq, length in lengths.items():
            assert join(self.kv, seq, length)

    def run(self, plan: Plan, rows: list[int] | None = None) -> mx.array | None:
        """Run a step; return the hidden states of the rows."""
        for seq, start, ids in plan:
            assert self.kv.reserve(seq, start + len(ids))
        views = self.kv.views([(seq, start, len(ids)) for seq, start, ids in plan])
        flat = mx.array([token for _, _, ids in plan for token in ids])
        states = self.model.hidden(flat, views, None if rows is None else mx.array(rows))
        mx.eval(views.step_end([] if states is None else [states]))
        for seq, _, ids in plan:
            self.kv.commit(seq, ids)
        self.kv.step_completed(views.epoch)
        return states

    def draft(self, plan: Plan) -> mx.array:
        """Draft after each token of the plan in turn; return states [turn, sequence, hidden]."""
        for seq, start, ids in plan:
            assert self.kv.reserve(seq, start + len(ids))
        turns: list[mx.array] = []
        for turn in range(len(plan[0][2])):
            views = self.kv.preview([(seq, start + turn) for seq, start, _ in plan])
            assert views.hidden is not None
            before = turns[-1] if turns else views.hidden.first()
            turns.append(
                self.model.draft(mx.array([ids[turn] for _, _, ids in plan]), before, views)
            )
            mx.eval(views.step_end([turns[-1]]))
        return mx.stack(turns)


def two_drafts(checkpoint: Checkpoint, ids: list[int], **how: Any) -> mx.array:
    """The states of drafts after the last two tokens of a prompt."""
    drafting, known = Drafting(checkpoint, {1: len(ids)}, **how), len(ids) - 2
    assert drafting.run([(1, 0, ids[:known])]) is None
    return drafting.draft([(1, known, ids[known:])])[:, 0]


class Reference:
    """A head in MLX's arrays of float32, which computes all rows of a sequence at once."""

    def __init__(self, arrays: dict[str, mx.array], layer: LayerSpec, eps: float) -> None:
        self._arrays, self._layer, self._eps = arrays, layer, eps

    def _get(self, name: str) -> mx.array:
        parts = [self._arrays.get(f"{name}.{part}") for part in ("weight", "scales", "biases")]
        codes, *groups = [part for part in parts if part is not None]
        if not groups:
            return codes.astype(mx.float32)
        scales, biases = (each.astype(mx.float32) for each in groups)
        return mx.dequantize(codes, scales, biases, group_size=32, bits=4)

    def _norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self._get(name), self._eps)

    def joined(self, embedded: mx.array, before: mx.array) -> mx.array:
        normed = [self._norm(embedded, "pre_fc_norm_embedding")]
        normed += [self._norm(before, "pre_fc_norm_hidden")]
        return mx.concatenate(normed, axis=-1) @ self._get("fc").T

    def states(self, x: mx.array) -> mx.array:
        x = x + self._attended(self._norm(x, "layers.0.input_layernorm"))
        x = x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _attended(self, x: mx.array) -> mx.array:
        its, at, gates = self._layer.mixer, "layers.0.self_attn", None
        assert isinstance(its, Attention)
        heads = {"q": its.heads, "k": its.kv_heads, "v": its.kv_heads}
        q, k, v = (
            (x @ self._get(f"{at}.{which}_proj").T).reshape(len(x), count, -1)
            for which, count in heads.items()
        )
        if its.output_gate:
            q, gates = mx.split(q, 2, axis=-1)
        q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{at}.k_norm")
        q, k, v = (each.swapaxes(0, 1)[None] for each in (q, k, v))
        how: dict[str, Any] = {"traditional": False, "scale": 1.0, "offset": 0}
        dims = its.rope.dims or its.head_dim
        q, k = (mx.fast.rope(each, dims, base=its.rope.base, **how) for each in (q, k))
        mixed = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=its.head_dim**-0.5, mask="causal"
        )
        mixed = mixed[0].swapaxes(0, 1) * (1 if gates is None else mx.sigmoid(gates))
        return mixed.reshape(len(x), -1) @ self._get(f"{at}.o_proj").T

    def _mlp(self, x: mx.array) -> mx.array:
        its, at = self._layer.mlp, "layers.0.mlp"
        if isinstance(its, DenseMlp):
            return _dense(x, [self._get(f"{at}.{which}_proj") for which in WHICH])
        shares = mx.softmax(x @ self._get(f"{at}.gate").T, axis=-1)
        shares = mx.where(shares < mx.sort(shares, axis=-1)[:, -its.chosen, None], 0, shares)
        shares = shares / shares.sum(axis=-1, keepdims=True)
        stacks = [self._get(f"{at}.switch_mlp.{which}_proj") for which in WHICH]
        shared = _dense(x, [self._get(f"{at}.shared_expert.{which}_proj") for which in WHICH])
        mixed = mx.sigmoid(x @ self._get(f"{at}.shared_expert_gate").T) * shared
        for number in range(its.experts):
            mixed += shares[:, number, None] * _dense(x, [stack[number] for stack in stacks])
        return mixed


def _dense(x: mx.array, matrices: list[mx.array]) -> mx.array:
    gate, up, down = matrices
    return (x @ gate.T * mx.sigmoid(x @ gate.T) * (x @ up.T)) @ down.T


def expected(folder: Path, ids: list[int], bits: int | None = None) -> mx.array:
    """What ``two_drafts`` should be, with the head that ``write_head`` writes for a folder."""
    checkpoint = read_checkpoint(folder, drafts=False)
    model, known = load_reference(checkpoint), len(ids) - 2
    text = getattr(model, "language_model", model).model
    layer = checkpoint.spec.with_draft_head().draft
    assert layer is not None
    head = Reference(head_arrays(folder, bits=bits), layer, checkpoint.spec.norm_eps)
    hidden = text(mx.array([ids[:known]]))[0]
    embedded = text.embed_tokens(mx.array(ids)).astype(mx.float32)
    x = mx.concatenate([mx.zeros_like(hidden[:1]), head.joined(embedded[1 : known + 1], hidden)])
    first = head.states(x)[-1:]
    x = mx.concatenate([x, head.joined(embedded[known + 1 :], first)])
    return mx.concatenate([first, head.states(x)[-1:]])


# --- drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("instruction_set", [*metal_ext.instruction_sets(), "MLX"])
@pytest.mark.parametrize("bits", [None, 4], ids=["plain", "4 bits"])
@pytest.mark.parametrize("fields", [QWEN3, FIELDS, QWEN3_5_MOE], ids=["qwen3", "dense", "moe"])
def test_two_drafts_are_those_of_a_reference_in_float32(
    tmp_path: Path, fields: dict[str, Any], bits: int | None, instruction_set: str
) -> None:
    on_mlx = instruction_set == "MLX"
    folder = write_hybrid(tmp_path, dtype="float32" if on_mlx else "bfloat16", **fields)
    want = expected(folder, prompt(90), bits)
    how = {"packed": False} if on_mlx else {"instruction_set": instruction_set}
    got = two_drafts(read_checkpoint(write_head(folder, bits=bits)), prompt(90), **how)
    assert spread(got, want) < TOLERANCE


@pytest.mark.parametrize(
    ("write", "tolerance"),
    [
        (lambda folder: write_hybrid(folder, dtype="float32", **GEMMA3), TOLERANCE),
        (write_bonsai, 0.02),  # MLX's embedding is of 16 bits
    ],
    ids=["gemma3", "bonsai"],
)
def test_operations_draft_the_same_for_scaled_embeddings_and_rotated_inputs(
    tmp_path: Path,
    write: Callable[[Path], Path],
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MlxOps, "rotated_dtype", mx.float32)
    checkpoint = read_checkpoint(write_head(write(tmp_path)))
    packed, mlx = (two_drafts(checkpoint, prompt(60), packed=packed) for packed in (True, False))
    assert spread(packed, mlx) < tolerance


def test_bits_depend_on_neither_the_head_nor_chunks_nor_company(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, dtype="bfloat16", head="mtp")
    checkpoint, a, b = read_checkpoint(folder), prompt(92), prompt(41, 1)
    company, plain = (
        Drafting(each, {1: 92, 2: 41})
        for each in (checkpoint, read_checkpoint(folder, drafts=False))
    )
    for plan, rows in (
        ([(1, 0, a[:37])], [0, 36]),
        ([(1, 37, a[37:38]), (2, 0, b[:39])], [0, 39]),
        ([(1, 38, a[38:90])], [51]),
    ):
        got, want = company.run(plan, rows), plain.run(plan, rows)
        assert np.array_equal(np.array(got), np.array(want))
    both = company.draft([(1, 90, a[90:]), (2, 39, b[39:])])
    for number, ids in enumerate((a, b)):
        assert mx.array_equal(both[:, number], two_drafts(checkpoint, ids)).item()


def test_a_gpu_computes_a_head_in_the_models_own_dtype(tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", SPEC, head="mtp")
    narrow = write_model(tmp_path / "narrow", SPEC, dtype="bfloat16")
    (wide / "mtp.safetensors").rename(narrow / "mtp.safetensors")
    ops, before = ours(read_checkpoint(narrow), packed=False).ops, mx.ones((2, SPEC.hidden_size))
    x = ops.join(mx.array([5, 6]), before.astype(mx.bfloat16))
    assert ops.draft_norm(ops.add_mlp(SPEC.num_hidden_layers, x)).dtype == mx.bfloat16


# --- names, layouts and places -------------------------------------------------------------------

OWN = "model-mtp.safetensors"
HUBS: dict[str, Any] = {"less_one": True}
Names = Callable[[Path, str], Path] | None
# Whether the model's own files are the hub's, where and how its head is stored, and the names of
# experts.
FORMS: dict[str, tuple[bool, dict[str, Any], Names]] = {
    "in the hub's files": (True, {"file": OWN} | HUBS, names_fused),
    "in MLX's files": (False, {"file": OWN, "prefix": "language_model.mtp."}, None),
    "MLX's, beside": (False, {}, None),
    "MLX's, beside the hub's files": (True, {"file": "optiq/mtp.safetensors"}, None),
    "bare names": (False, {"file": "draft.safetensors", "prefix": ""}, None),
    "the hub's, beside": (False, HUBS, names_fused),
    "the hub's, with experts apart": (True, HUBS, names_apart),
    "the hub's, below": (True, HUBS | {"file": "mtp/weights.safetensors"}, None),
}
LEFT_OUT = "is served without what its files have for"


@FAMILIES
@pytest.mark.parametrize(("hub", "how", "names"), FORMS.values(), ids=FORMS)
def test_a_head_is_the_same_under_all_names_and_in_all_layouts(
    tmp_path: Path, fields: dict[str, Any], hub: bool, how: dict[str, Any], names: Names
) -> None:
    want = expected(write_hybrid(tmp_path / "a", dtype="float32", **fields), prompt(40))
    folder = write_hybrid(tmp_path / "b", dtype="float32", hub=hub, head=None, **fields)
    write_head(folder, **how)
    if names is not None and "num_experts" in fields:
        names(folder, how.get("file", "mtp.safetensors"))
    checkpoint = read_checkpoint(folder)
    assert spread(two_drafts(checkpoint, prompt(40)), want) < TOLERANCE
    images = f"{checkpoint.spec.family} {LEFT_OUT} images (1 tensor)"
    assert checkpoint.left_out == (images if hub else None)


@pytest.mark.parametrize(
    ("bits", "how"),
    [
        (None, {}),
        (4, {"prefix": "mtp.", "others": True}),
        (None, HUBS),
        (4, HUBS),
    ],
    ids=str,
)
def test_a_companion_is_taken_before_the_models_own_head(
    tmp_path: Path, bits: int | None, how: dict[str, Any]
) -> None:
    folder, ids = write_hybrid(tmp_path / "model", dtype="bfloat16"), prompt(40)
    want = expected(folder, ids, bits)
    companion = write_companion(tmp_path / "companion", folder, bits=bits, **how)
    own = read_checkpoint(write_head(folder, OWN, seed=8, bits=4))
    other = read_checkpoint(folder, draft=companion)
    assert spread(two_drafts(other, ids), want) < TOLERANCE < spread(two_drafts(own, ids), want)
    assert not other.quantized
    assert other.left_out is None


@BOTH
def test_whole_norms_of_other_families_are_never_shifted(tmp_path: Path, packed: bool) -> None:
    folder = write_model(tmp_path, SPEC)
    want = expected(folder, prompt(40))
    checkpoint = read_checkpoint(write_head(folder))
    assert spread(two_drafts(checkpoint, prompt(40), packed=packed), want) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("less_one", [True, False])
def test_norms_of_queries_and_keys_tell_what_a_file_stores(
    tmp_path: Path, dtype: str, less_one: bool
) -> None:
    folder = write_head(write_hybrid(tmp_path, dtype=dtype), less_one=less_one)
    assert read_checkpoint(folder).draft_naming.zero_centred is less_one


# --- what is counted, left out and refused -------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 4])
def test_a_heads_bytes_numbers_and_kv_are_counted(tmp_path: Path, bits: int | None) -> None:
    folder, sizes = write_hybrid(tmp_path, dtype="bfloat16", **QWEN3_5_MOE), list[int]()
    plain, numbers = read_checkpoint(folder), head_arrays(folder).values()
    whole = read_checkpoint(write_head(folder, bits=bits))
    stored = sum(each.nbytes for each in head_arrays(folder, bits=bits).values())
    assert whole.stored_bytes - plain.stored_bytes == stored
    assert whole.num_weights - plain.num_weights == sum(each.size for each in numbers)
    load_model(whole, lambda done, _: sizes.append(done), metal_ext.CpuWorkers(1))
    assert sizes[-2] == whole.packed_bytes - 4 * whole.tensors.count(1) > plain.packed_bytes
    layers = whole.spec.kv_shape(KVFormat.BFLOAT16).layers
    assert layers == (*plain.spec.kv_shape(KVFormat.BFLOAT16).layers, layers[0])
    assert whole.spec.places == [*plain.spec.places, 2]


def test_a_head_that_is_not_wanted_is_left_out(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, dtype="bfloat16")
    plain = read_checkpoint(folder)
    mx.save_safetensors(str(folder / "other.safetensors"), {"norm.weight": mx.ones((3,))})
    assert read_checkpoint(folder) == plain
    assert read_checkpoint(write_head(folder), drafts=False) == plain
    assert read_checkpoint(folder, embeds=True).spec.draft is None
    (folder / "mtp.safetensors").rename(folder / OWN)
    without = read_checkpoint(folder, drafts=False)
    assert (without.spec, without.stored_bytes) == (plain.spec, plain.stored_bytes)
    assert without.left_out == f"Qwen3.5 {LEFT_OUT} drafts of tokens (15 tensors)"
    later = read_checkpoint(folder).without_draft_head("slow")
    assert later.spec == plain.spec
    assert later.left_out == f"Qwen3.5 {LEFT_OUT} drafts of tokens (15 tensors; slow)"


FAULTS: list[tuple[Callable[[dict[str, mx.array]], object], str]] = [
    (lambda a: a.pop("mtp.fc.weight"), "no file holds the tensor mtp.fc.weight"),
    (
        lambda a: a.update({"mtp.norm.weight": mx.ones((3,))}),
        r"safetensors: mtp.norm.weight is F32 \[3\]",
    ),
    (
        lambda a: a.update({"mtp.layers.1.x.weight": mx.ones((3,))}),
        "safetensors: the tensor mtp.layers.1.x.weight has no place in a Qwen3.5 model",
    ),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_faulty_head_is_refused_or_left_out_by_name(
    tmp_path: Path, change: Callable[[dict[str, mx.array]], object], message: str
) -> None:
    def edit(file: Path) -> None:
        arrays = cast(dict[str, mx.array], mx.load(str(file)))
        mx.eval(arrays)
        change(arrays)
        mx.save_safetensors(str(file), arrays, {"format": "mlx"})

    folder = write_hybrid(tmp_path / "model", dtype="bfloat16", head="mtp")
    companion = write_companion(tmp_path / "companion", folder, prefix="mtp.")
    edit(companion / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"companion.*{message}"):
        read_checkpoint(folder, draft=companion)
    edit(folder / "mtp.safetensors")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.spec.draft is None
    assert str(checkpoint.left_out).startswith(f"Qwen3.5 {LEFT_OUT} drafts of tokens ({folder}")
    (folder / "mtp.safetensors").rename(folder / OWN)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_a_head_with_offsets_beyond_its_file_is_left_out_by_name(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, dtype="bfloat16", head="mtp")
    os.truncate(folder / "mtp.safetensors", (folder / "mtp.safetensors").stat().st_size - 1)
    assert re.search("mtp.safetensors: .* was cut off", str(read_checkpoint(folder).left_out))


def test_a_companion_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(CheckpointError, match="no file holds the tensor pre_fc_norm_hidden"):
        read_checkpoint(folder, draft=folder)


def test_a_head_attends_to_all_tokens_where_the_last_layer_does_not(tmp_path: Path) -> None:
    spec = read_checkpoint(write_hybrid(tmp_path, **GEMMA3 | {"num_hidden_layers": 5})).spec
    windows = [its.window for its in spec.with_draft_head().attentions]
    assert windows == [40, 40, None, 40, 40, None]
