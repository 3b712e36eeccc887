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


def folder_for_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    file.mkdir()


def link(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


def pipe(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def large_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(file, 2 * MAX_HEADER_BYTES)


BROKEN: list[tuple[str, Edit, str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), r"config.json: the file does not exist"),
    (
        "config is no JSON",
        lambda f: (f / "config.json").write_text("{"),
        r"config.json: the file is not readable JSON",
    ),
    (
        "config is a list",
        lambda f: (f / "config.json").write_text("[]"),
        r"config.json: the file is not a JSON object",
    ),
    (
        "weights that are a folder",
        folder_for_weights,
        r"model.safetensors: this is no regular file",
    ),
    (
        "weights that lead nowhere",
        link("model.safetensors", "gone"),
        r"model.safetensors: the file cannot be read: No such file",
    ),
    ("weights without an end", link("model.safetensors", "/dev/zero"), "this is no regular file"),
    ("an endless config", link("config.json", "/dev/zero"), "config.json: this is no regular file"),
    ("a pipe as config", pipe("config.json"), r"config.json: this is no regular file"),
    ("a pipe as weights", pipe("model.safetensors"), r"tensors: this is no regular file"),
    ("a pipe as index", pipe(INDEX_FILE), r"index.json: this is no regular file"),
    ("an endless index", link(INDEX_FILE, "/dev/zero"), r"index.json: this is no regular file"),
    (
        "a pipe as recommendations",
        pipe("generation_config.json"),
        r"generation_config.json: this is no regular file",
    ),
    (
        "a config of 200 MB",
        lambda f: os.truncate(f / "config.json", 200_000_000),
        r"config.json: the file has 200000000 bytes; of JSON quire reads 33554432 at most",
    ),
    (
        "a deep config",
        lambda f: (f / "config.json").write_text("[" * 200_000),
        r"config.json: the file is not readable JSON",
    ),
    (
        "a deep header",
        lambda f: (f / "model.safetensors").write_bytes(
            struct.pack("<Q", 200_000) + b"[" * 200_000
        ),
        r"model.safetensors: the header is not JSON",
    ),
    (
        "a large header",
        large_header,
        r"model.safetensors: the header has 16777217 bytes; quire reads 16777216 at most",
    ),
    (
        "eos is text",
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        r"eos_token_id is 'x'",
    ),
    (
        "the config has another width",
        config(hidden_size=128),
        r"model.safetensors: model.embed_tokens.weight is BF16 \[1024, 64\], .* \[1024, 128\]",
    ),
    (
        "the config has more layers",
        config(num_hidden_layers=3),
        r"no file holds the tensor model.layers.2.input_layernorm.weight",
    ),
    (
        "the config has fewer layers",
        config(num_hidden_layers=1),
        r"model.safetensors: the tensor model.layers.1.* has no place",
    ),
    (
        "no weights",
        lambda f: (f / "model.safetensors").unlink(),
        r"there is no model\*.safetensors file",
    ),
    ("an empty file", cut(0), r"model.safetensors: the file has 0 bytes"),
    ("half a header", cut(100), r"model.safetensors: the header claims \d+ bytes, .* has 100"),
    ("cut off", cut(-1), r"model.safetensors: model.* ends at byte \d+ .*: it was cut off"),
    (
        "a header that is no JSON",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 3) + b"{{{"),
        r"model.safetensors: the header is not JSON",
    ),
    (
        "a header that is a list",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
        r"model.safetensors: the header is not an object",
    ),
    (
        "an enormous header",
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}"),
        r"the header claims 9223372036854775808 bytes",
    ),
    ("no offsets", header(lambda h: h[Q_PROJ].pop("data_offsets")), Q_PROJ + " needs dtype, shape"),
    ("a strange dtype", header(set_field(Q_PROJ, "dtype", "I8")), r"has the dtype I8"),
    (
        "another dtype of that width",
        header(set_field(Q_PROJ, "shape", [32, 64])),
        Q_PROJ + r" has data_offsets .* takes 4096 bytes",
    ),
    (
        "a negative shape",
        header(set_field(Q_PROJ, "shape", [-64, -64])),
        Q_PROJ + " has data_offsets",
    ),
    (
        "negative offsets",
        header(set_field(Q_PROJ, "data_offsets", [-8192, 0])),
        Q_PROJ + " ends at byte 0",
    ),
    (
        "a tensor that is not ours",
        header(lambda h: h.__setitem__("rogue", h["model.norm.weight"])),
        r"the tensor rogue has no place in a Qwen3 model",
    ),
    (
        "a missing shard",
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {Q_PROJ: "model-00002-of-00002.safetensors"}})
        ),
        r"model-00002-of-00002.safetensors: this shard is named in .*index.json, but",
    ),
    (
        "a shard whose name no disk has",
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {Q_PROJ: "x" * 5000}})
        ),
        r"xxx: this shard is named in .*index.json, but",
    ),
    (
        "an index without a map",
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        r"model.safetensors.index.json: weight_map is missing",
    ),
    (
        "a tensor in two shards",
        lambda f: (f / "model-b.safetensors").write_bytes((f / "model.safetensors").read_bytes()),
        r"the tensor model.* is also in model-b.safetensors",
    ),
]


@pytest.mark.parametrize(
    ("edit", "message"), [pytest.param(edit, message, id=name) for name, edit, message in BROKEN]
)
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


BROKEN_PACKING: list[tuple[str, Edit, str]] = [
    (
        "the config says nothing",
        config(quantization=...),
        r"scales exists, but config.json has no quantization",
    ),
    ("no bits", config(quantization={"group_size": 32}), "needs the numbers bits and group_size"),
    ("three bits", packed(bits=3), r"3 bits in groups of 32"),
    (
        "seven bits",
        config(quantization={"group_size": 32, "bits": 7}),
        r"quantization.bits is 7; it must be 1 or 2 or 3 or 4 or 5 or 6 or 8",
    ),
    (
        "groups of 16",
        config(quantization={"group_size": 16, "bits": 4}),
        r"quantization.group_size is 16; it must be 32 or 64 or 128",
    ),
    ("eight bits", packed(bits=8), r"8 bits in groups of 32"),
    ("other groups", packed(group_size=64), r"4 bits in groups of 64"),
    (
        "another mode",
        packed(mode="mxfp4"),
        r"q_proj.scales is F32 \[64, 2\], .* makes it U8 \[64, 2\]",
    ),
    (
        "codes of another layer",
        takes_of("weight", "model.layers.1.self_attn.k_proj.weight"),
        r"q_proj.weight is U32 \[32, 8\], .* \(4 bits in groups of 32\) .* U32 \[64, 8\]",
    ),
    (
        "groups of 16 by shape",
        takes_of("scales", "model.layers.1.mlp.down_proj.scales"),
        r"q_proj.scales is F32 \[64, 4\], .* \(4 bits in groups of 32\) .* F32 \[64, 2\]",
    ),
    (
        "an unknown mode",
        config(quantization={"group_size": 32, "bits": 4, "mode": "roman"}),
        r"quantization.mode is 'roman'; it must be one of affine, mxfp4, mxfp8, nvfp4",
    ),
    (
        "a mode that is no word",
        config(quantization={"group_size": 32, "bits": 4, "mode": ["affine"]}),
        r"quantization.mode is \['affine'\]; it must be one of",
    ),
    (
        "endless bits",
        config(quantization={"group_size": 32, "bits": math.inf}),
        "needs the numbers bits and group_size",
    ),
    (
        "no biases",
        header(lambda h: h.pop("model.layers.1.self_attn.q_proj.biases")),
        r"q_proj.biases is missing beside",
    ),
]


@pytest.mark.parametrize(
    ("edit", "message"),
    [pytest.param(edit, message, id=name) for name, edit, message in BROKEN_PACKING],
)
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
