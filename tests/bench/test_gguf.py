import json
import sys
from enum import Enum, auto
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.bench import gguf
from tests.bench.gguf import NO_MERGE, tensor_name
from tests.bench.models import KINDS, ModelStore
from tests.models import ModelSpec
from tests.published import Published

SPEC = ModelSpec(vocab_size=300)


class TokenType(Enum):
    NORMAL = auto()
    CONTROL = auto()
    USER_DEFINED = auto()


class Type(Enum):
    """Of files and of tensors."""

    ALL_F32 = auto()
    MOSTLY_BF16 = auto()
    BF16 = auto()


class Writer:
    """Writes down what it is asked to write."""

    last: "Writer"

    def __init__(self, file: str, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self.said: dict[str, Any] = {}
        self.tensors: dict[str, tuple[np.ndarray, Any]] = {}
        self.steps: list[str] = []
        Writer.last = self

    def add_tensor(self, name: str, array: np.ndarray, raw_dtype: Any = None) -> None:
        self.tensors[name] = (array, raw_dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda value: self.said.update({name.removeprefix("add_"): value})
        return lambda: self.steps.append(name)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the package, which the project does not depend on."""
    fake = ModuleType("gguf")
    fake.__dict__.update(
        GGUFWriter=Writer, TokenType=TokenType, LlamaFileType=Type, GGMLQuantizationType=Type
    )
    monkeypatch.setitem(sys.modules, "gguf", fake)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ModelStore(tmp_path_factory.mktemp("store"), Published(SPEC)).bfloat16()


@pytest.mark.usefixtures("package")
def test_the_file_has_the_models_words_and_none_that_give_no_text(model: Path) -> None:
    assert gguf.main([str(model), "out.gguf"]) == 0
    said = Writer.last.said
    assert (Writer.last.file, Writer.last.architecture) == ("out.gguf", "qwen3")
    assert (said["tokenizer_model"], said["tokenizer_pre"]) == ("gpt2", "qwen2")
    words, types = said["token_list"], said["token_types"]
    assert len(words) == len(types) == len(set(words)) == SPEC.vocab_size
    special = [word for word, kind in zip(words, types, strict=True) if kind is TokenType.CONTROL]
    assert special == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    defined = [w for w, kind in zip(words, types, strict=True) if kind is TokenType.USER_DEFINED]
    assert defined == ["<think>", "</think>"]
    assert types.count(TokenType.NORMAL) == SPEC.vocab_size - 5
    assert words[said["eos_token_id"]] == "<|im_end|>"
    assert "<|im_start|>" in said["chat_template"]
    assert said["add_bos_token"] is False
    left, right = NO_MERGE.split()
    assert left + right not in words, "no two bytes become one token"


@pytest.mark.usefixtures("package")
def test_the_file_has_the_models_dimensions_and_weights(model: Path) -> None:
    gguf.main([str(model), "out.gguf"])
    said, tensors = Writer.last.said, Writer.last.tensors
    assert (said["block_count"], said["embedding_length"]) == (2, 64)
    assert (said["head_count"], said["head_count_kv"], said["key_length"]) == (2, 1, 32)
    assert (said["rope_freq_base"], said["layer_norm_rms_eps"]) == (1e6, 1e-6)
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    assert len(tensors) == len(weights)
    bits, kind = tensors["blk.1.ffn_down.weight"]
    expected = weights["model.layers.1.mlp.down_proj.weight"]
    assert kind is Type.BF16
    assert np.array_equal(bits.view(np.uint16), np.array(expected.view(mx.uint16)))
    norm, kind = tensors["output_norm.weight"]
    assert norm.dtype == np.float32
    assert kind is None
    assert Writer.last.steps[-1] == "close"


@pytest.mark.usefixtures("package")
def test_what_is_float32_stays_so(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, Published(SPEC))
    for model, kind in ((store.bfloat16(), Type.MOSTLY_BF16), (store.float32(), Type.ALL_F32)):
        gguf.main([str(model), "out.gguf"])
        assert Writer.last.said["file_type"] is kind
    weights = mx.load(str(store.float32() / "model.safetensors"))
    assert isinstance(weights, dict)
    array, packed_as = Writer.last.tensors["blk.0.attn_q.weight"]
    assert array.dtype == np.float32
    assert packed_as is None
    assert np.array_equal(array, np.array(weights["model.layers.0.self_attn.q_proj.weight"]))


HYBRID = KINDS["qwen3.5-0.8b"].fields | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MIXTURE = KINDS["qwen3-30b-a3b-eighth"].fields | {"num_experts": 8, "moe_intermediate_size": 64}


@pytest.mark.usefixtures("package")
def test_a_hybrid_has_its_convolutions_and_decays_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    spec = ModelSpec(num_hidden_layers=4, vocab_size=300)
    model = ModelStore(tmp_path, Published(spec, HYBRID)).bfloat16()
    gguf.main([str(model), "out.gguf"])
    said, tensors = Writer.last.said, Writer.last.tensors
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    assert Writer.last.architecture == "qwen35"
    assert (said["ssm_group_count"], said["ssm_inner_size"], said["rope_freq_base"]) == (
        2,
        256,
        1e7,
    )
    assert len(tensors) == len(weights)
    conv, _ = tensors["blk.0.ssm_conv1d.weight"]
    assert conv.shape == (2 * 256 + 256, 4)
    assert conv.dtype == np.float32
    assert np.all(tensors["blk.2.ssm_a"][0] < 0)
    assert "blk.3.attn_q.weight" in tensors
    assert "blk.3.post_attention_norm.weight" in tensors


@pytest.mark.usefixtures("package")
def test_a_mixture_has_its_experts_in_one_tensor_and_its_router_in_float32(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, Published(ModelSpec(vocab_size=300), MIXTURE))
    gguf.main([str(store.bfloat16()), "out.gguf"])
    said, tensors = Writer.last.said, Writer.last.tensors
    assert Writer.last.architecture == "qwen3moe"
    assert (said["expert_count"], said["expert_used_count"]) == (8, 8)
    assert tensors["blk.1.ffn_gate_exps.weight"][0].shape[:2] == (8, 64)
    assert tensors["blk.1.ffn_gate_inp.weight"][0].dtype == np.float32
    config = json.loads((store.quantised() / "config.json").read_text())
    assert config["quantization"]["model.layers.0.mlp.gate"]["bits"] == 8


def test_every_weight_has_a_name_and_packed_ones_have_none() -> None:
    assert tensor_name("model.embed_tokens.weight", "qwen3") == "token_embd.weight"
    its = "model.layers.7.self_attn.q_norm.weight"
    assert tensor_name(its, "qwen3") == "blk.7.attn_q_norm.weight"
    for packed in (
        "model.layers.7.self_attn.q_proj.scales",
        "model.blocks.1.mlp.weight",
        "lm_head.weight",
    ):
        with pytest.raises(KeyError):
            tensor_name(packed, "qwen3")
