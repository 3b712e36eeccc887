"""A model folder is refused before it is loaded, in one sentence that names file and field."""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.models.checkpoint import CheckpointError, read_checkpoint
from engine.models.config import Quantization
from engine.models.safetensors_headers import INDEX_FILE, MAX_HEADER_BYTES
from tests.families import HYBRID
from tests.models import TINY, ModelSpec, write_model
from tests.reference import load_reference

Edit = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", dtype="bfloat16")


def config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        values = json.loads(file.read_text())
        for key, value in changes.items():
            if value is ...:
                del values[key]
            else:
                values[key] = value
        file.write_text(json.dumps(values))

    return edit


def header(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        change(values)
        text = json.dumps(values).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def cut(keep: int) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return edit


def set_field(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values[name].__setitem__(field, value)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_a_whole_folder_is_read(folder: Path) -> None:
    found = read_checkpoint(folder)
    assert len(found.spec.layers) == TINY.num_hidden_layers
    assert found.spec.attentions[0].kv_heads == TINY.num_key_value_heads
    assert found.vocab_size == TINY.vocab_size
    assert found.dtype == "BF16"
    assert found.eos_token_ids == (258, 256)
    assert found.stored_bytes == 2 * found.num_weights


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_understood(tmp_path: Path, bits: int) -> None:
    found = read_checkpoint(write_model(tmp_path, bits=bits))
    assert found.stored_bytes < found.num_weights * 2


def test_an_untied_head_is_expected_where_the_config_says_so(tmp_path: Path) -> None:
    found = read_checkpoint(write_model(tmp_path, ModelSpec(tie_word_embeddings=False)))
    assert not found.spec.tied_embeddings
    assert found.num_weights > read_checkpoint(write_model(tmp_path / "tied")).num_weights


def test_a_superfluous_head_is_tolerated_where_embeddings_are_tied(tmp_path: Path) -> None:
    write_model(tmp_path, ModelSpec(tie_word_embeddings=False))
    config(tie_word_embeddings=True)(tmp_path)
    assert read_checkpoint(tmp_path).spec.tied_embeddings


def test_shards_named_by_the_index_are_read_together(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {Q_PROJ: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(read_checkpoint(folder).spec.layers) == 2


@pytest.mark.parametrize("main", ["model", "weights-1-of-2"])
@pytest.mark.parametrize("other", ["mtp", "outside", "visual", "model-draft", "pytorch_model.bin"])
@pytest.mark.parametrize("there", [True, False])
def test_a_shard_of_the_index_may_have_any_name_and_must_be_there(
    tmp_path: Path, main: str, other: str, there: bool
) -> None:
    folder, draft = write_model(tmp_path, **HYBRID), {"mtp.norm.weight": mx.ones((4,))}
    names = (f"{main}.safetensors", f"{other}.safetensors")
    (folder / "model.safetensors").rename(folder / names[0])
    index = {"weight_map": {Q_PROJ: names[0]} | dict.fromkeys(draft, names[1])}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if there:
        mx.save_safetensors(str(folder / names[1]), draft)
        assert read_checkpoint(folder).unread == tuple(draft)
    else:
        with pytest.raises(CheckpointError, match=rf"{names[1]}: this shard is named in"):
            read_checkpoint(folder)


def test_eos_tokens_come_from_the_config_where_there_is_no_other_file(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_checkpoint(folder).eos_token_ids == ()
    config(eos_token_id=258)(folder)
    assert read_checkpoint(folder).eos_token_ids == (258,)


WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
IRREGULAR = "this is no regular file"


def change(name: str, make: Callable[[Path], object]) -> Edit:
    """Put something else in the place of a file."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return edit


def written(name: str, text: str | bytes) -> Edit:
    return change(
        name, lambda file: file.write_bytes(text if isinstance(text, bytes) else text.encode())
    )


def of_length(name: str, count: int, text: bytes = b"") -> Edit:
    def make(file: Path) -> None:
        file.write_bytes(text)
        os.truncate(file, count)

    return change(name, make)


def with_header(length: int, text: bytes) -> Edit:
    return written(WEIGHTS, struct.pack("<Q", length) + text)


def link(name: str, target: str) -> Edit:
    return change(name, lambda file: file.symlink_to(target))


def pipe(name: str) -> Edit:
    return change(name, os.mkfifo)


def gone(name: str) -> Edit:
    return change(name, lambda _: None)


def index(weight_map: dict[str, str]) -> Edit:
    return written(INDEX_FILE, json.dumps({"weight_map": weight_map}))


BROKEN: dict[str, tuple[Edit, str]] = {
    "no config": (gone(CONFIG), "config.json: the file does not exist"),
    "config is no JSON": (written(CONFIG, "{"), "config.json: the file is not readable JSON"),
    "config is a list": (written(CONFIG, "[]"), "config.json: the file is not a JSON object"),
    "a folder": (change(WEIGHTS, Path.mkdir), f"model.safetensors: {IRREGULAR}"),
    "weights that lead nowhere": (link(WEIGHTS, "gone"), "ors: the file cannot be read: No such"),
    "weights without an end": (link(WEIGHTS, "/dev/zero"), f"model.safetensors: {IRREGULAR}"),
    "an endless config": (link(CONFIG, "/dev/zero"), f"config.json: {IRREGULAR}"),
    "a pipe as config": (pipe(CONFIG), f"config.json: {IRREGULAR}"),
    "a pipe as weights": (pipe(WEIGHTS), f"model.safetensors: {IRREGULAR}"),
    "a pipe as index": (pipe(INDEX_FILE), f"index.json: {IRREGULAR}"),
    "an endless index": (link(INDEX_FILE, "/dev/zero"), f"index.json: {IRREGULAR}"),
    "a pipe as recommendations": (pipe(GENERATION), f"generation_config.json: {IRREGULAR}"),
    "a config of 200 MB": (
        of_length(CONFIG, 200_000_000),
        "config.json: the file has 200000000 bytes; of JSON quire reads 33554432 at most",
    ),
    "a deep config": (written(CONFIG, "[" * 200_000), "config.json: the file is not readable JSON"),
    "a deep header": (with_header(200_000, b"[" * 200_000), "tensors: the header is not JSON"),
    "a large header": (
        of_length(WEIGHTS, 2 * MAX_HEADER_BYTES, struct.pack("<Q", MAX_HEADER_BYTES + 1)),
        "model.safetensors: the header has 16777217 bytes; quire reads 16777216 at most",
    ),
    "eos is text": (written(GENERATION, '{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
    "the config has another width": (
        config(hidden_size=128),
        r"model.safetensors: model.embed_tokens.weight is BF16 \[1024, 64\], .* \[1024, 128\]",
    ),
    "the config has more layers": (
        config(num_hidden_layers=3),
        "no file holds the tensor model.layers.2.input_layernorm.weight",
    ),
    "the config has fewer layers": (
        config(num_hidden_layers=1),
        "model.safetensors: the tensor model.layers.1.* has no place",
    ),
    "no weights": (gone(WEIGHTS), r"there is no model\*.safetensors file"),
    "an empty file": (cut(0), "model.safetensors: the file has 0 bytes"),
    "half a header": (cut(100), r"model.safetensors: the header claims \d+ bytes, .* has 100"),
    "cut off": (cut(-1), r"model.safetensors: model.* ends at byte \d+ .*: it was cut off"),
    "a header that is no JSON": (with_header(3, b"{{{"), "tensors: the header is not JSON"),
    "a header that is a list": (with_header(2, b"[]"), "tensors: the header is not an object"),
    "an enormous header": (with_header(2**63, b"{}"), "the header claims 9223372036854775808 byt"),
    "no offsets": (header(lambda h: h[Q_PROJ].pop("data_offsets")), f"{Q_PROJ} needs dtype, shape"),
    "a strange dtype": (header(set_field(Q_PROJ, "dtype", "I8")), "has the dtype I8"),
    "another dtype of that width": (
        header(set_field(Q_PROJ, "shape", [32, 64])),
        f"{Q_PROJ} has data_offsets .* takes 4096 bytes",
    ),
    "a negative shape": (
        header(set_field(Q_PROJ, "shape", [-64, -64])),
        f"{Q_PROJ} has data_offsets",
    ),
    "negative offsets": (
        header(set_field(Q_PROJ, "data_offsets", [-8192, 0])),
        f"{Q_PROJ} ends at byte 0",
    ),
    "a tensor that is not ours": (
        header(lambda h: h.__setitem__("rogue", h["model.norm.weight"])),
        "the tensor rogue has no place in a Qwen3 model",
    ),
    "a missing shard": (
        index({Q_PROJ: "model-00002-of-00002.safetensors"}),
        "model-00002-of-00002.safetensors: this shard is named in .*index.json, but",
    ),
    "a shard whose name no disk has": (
        index({Q_PROJ: "x" * 5000}),
        "xxx: this shard is named in .*index.json, but",
    ),
    "an index without a map": (written(INDEX_FILE, "{}"), "index.json: weight_map is missing"),
    "a tensor in two shards": (
        lambda f: (f / "model-b.safetensors").write_bytes((f / WEIGHTS).read_bytes()),
        "the tensor model.* is also in model-b.safetensors",
    ),
}


@pytest.mark.parametrize(("edit", "message"), BROKEN.values(), ids=BROKEN)
def test_fault_16_a_broken_folder_is_refused_by_name(
    folder: Path, edit: Edit, message: str
) -> None:
    edit(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_packing_of_null_is_none(folder: Path) -> None:
    before = read_checkpoint(folder)
    config(quantization_config=None)(folder)
    assert read_checkpoint(folder) == before


def packed(**own: Any) -> Edit:
    """Names a layer that is packed otherwise."""
    four = {"group_size": 32, "bits": 4}
    return config(quantization=four | {Q_PROJ.removesuffix(".weight"): four | own})


def takes_of(part: str, other: str) -> Edit:
    """Gives a part of that layer what another tensor has."""
    name = Q_PROJ.removesuffix("weight") + part
    return header(lambda h: h.__setitem__(name, h[other]))


BROKEN_PACKING: list[tuple[Edit, str]] = [
    (config(quantization=...), "scales exists, but config.json has no quantization"),
    (config(quantization={"group_size": 32}), "needs the numbers bits and group_size"),
    (packed(bits=3), "3 bits in groups of 32"),
    (
        config(quantization={"group_size": 32, "bits": 7}),
        "quantization.bits is 7; it must be 1 or 2 or 3 or 4 or 5 or 6 or 8",
    ),
    (
        config(quantization={"group_size": 16, "bits": 4}),
        "quantization.group_size is 16; it must be 32 or 64 or 128",
    ),
    (packed(bits=8), "8 bits in groups of 32"),
    (packed(group_size=64), "4 bits in groups of 64"),
    (packed(mode="mxfp4"), r"q_proj.scales is F32 \[64, 2\], .* makes it U8 \[64, 2\]"),
    (
        takes_of("weight", "model.layers.1.self_attn.k_proj.weight"),
        r"q_proj.weight is U32 \[32, 8\], .* \(4 bits in groups of 32\) .* U32 \[64, 8\]",
    ),
    (
        takes_of("scales", "model.layers.1.mlp.down_proj.scales"),
        r"q_proj.scales is F32 \[64, 4\], .* \(4 bits in groups of 32\) .* F32 \[64, 2\]",
    ),
    (
        config(quantization={"group_size": 32, "bits": 4, "mode": "roman"}),
        "quantization.mode is 'roman'; it must be one of affine, mxfp4, mxfp8, nvfp4",
    ),
    (
        config(quantization={"group_size": 32, "bits": 4, "mode": ["affine"]}),
        r"quantization.mode is \['affine'\]; it must be one of",
    ),
    (
        config(quantization={"group_size": 32, "bits": math.inf}),
        "needs the numbers bits and group_size",
    ),
    (
        header(lambda h: h.pop("model.layers.1.self_attn.q_proj.biases")),
        "q_proj.biases is missing beside",
    ),
]


@pytest.mark.parametrize(("edit", "message"), BROKEN_PACKING)
def test_broken_packing_is_refused_by_name(tmp_path: Path, edit: Edit, message: str) -> None:
    write_model(tmp_path, bits=4)
    edit(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


SIX, EIGHT = {"bits": 6, "group_size": 64}, {"bits": 8, "group_size": 32}
OWN_WAYS: list[dict[str, Any]] = [
    {"layers": {"v_proj": SIX, "1.mlp.up_proj": EIGHT}},
    {"layers": {"embed_tokens": EIGHT, "down_proj": {"bits": 3, "group_size": 128}}},
    {"mode": "mxfp4", "layers": {"q_proj": EIGHT | {"mode": "affine"}}},
    {"layers": {"o_proj": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}},
    {"layers": {"k_proj": EIGHT | {"mode": "mxfp8"}, "gate_proj": False}},
    {"layers": {"out_proj": SIX, "in_proj_qkv": EIGHT}} | HYBRID,
]


@pytest.mark.parametrize("how", OWN_WAYS, ids=str)
@pytest.mark.parametrize("prefix", ["model.language_model.", "text.", "", None])
def test_how_a_layer_is_packed_follows_from_its_shapes_where_it_is_not_named(
    tmp_path: Path, how: dict[str, Any], prefix: str | None
) -> None:
    """prefix: what the config's names begin with; None: it names no layers."""
    write_model(tmp_path, ModelSpec(hidden_size=128), bits=4, **how)
    named = read_checkpoint(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())["quantization"]
    default = {name: value for name, value in values.items() if not isinstance(value, dict | bool)}
    own = {name.split("model.")[-1]: value for name, value in values.items() if name not in default}
    renamed = {f"{prefix}{name}": value for name, value in own.items() if prefix is not None}
    config(quantization=default | renamed)(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint == named
    theirs = {
        name: Quantization(module.bits, module.group_size, module.mode)
        for name, module in load_reference(checkpoint, stored=True).named_modules()
        if hasattr(module, "bits")
    }
    assert checkpoint.packings == theirs


def test_a_layer_may_be_packed_in_its_own_way(tmp_path: Path) -> None:
    write_model(tmp_path, bits=4)
    own = {"model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 4}}
    config(quantization={"group_size": 32, "bits": 4} | own)(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.*4 bits in groups of 64"):
        read_checkpoint(tmp_path)
