"""Random models that never end an answer by themselves, and whose every token is whole text."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.families import PUBLISHED, Published
from tests.models import ModelSpec, write_model

ARCHITECTURES = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5": "qwen35"}
"""GGUF's name of a family, by its model_type."""
TENSORS = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.switch_mlp.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.switch_mlp.up_proj.weight": "ffn_up_exps.weight",
    "mlp.switch_mlp.down_proj.weight": "ffn_down_exps.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
POST_NORM = {"qwen35": "post_attention_norm.weight"}
"""Other names of the norm before the MLP."""
EMBEDDING = "embed_tokens.weight"
ENDS = {EMBEDDING: "token_embd.weight", "norm.weight": "output_norm.weight"}
MODEL = "model."
# How many pairs of a head turn by a token's place in time, height and width: Qwen3.5's.
ROPE_SECTIONS = (11, 11, 10, 0)
# A file has to have merges. This one joins bytes that no text has, to a token that there is not.
NO_MERGE = "\u0100 \u0100"


def write_gguf(model: Path, out: Path) -> None:
    from gguf import GGUFWriter

    config = json.loads((model / "config.json").read_text())
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(str(out), architecture)
    _add_dimensions(writer, config)
    if architecture == "qwen3moe":
        _add_experts(writer, config)
    if architecture == "qwen35":
        _add_recurrence(writer, config)
    _add_tokenizer(writer, model, config["vocab_size"])
    for name, array in sorted(weights.items()):
        _add_tensor(writer, tensor_name(name, architecture), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(name: str, architecture: str) -> str:
    """Return GGUF's name of a weight. Raises KeyError when there is none."""
    name = name.removeprefix("language_model.")
    if not name.startswith(MODEL):
        raise KeyError(name)
    name = name.removeprefix(MODEL)
    if name in ENDS:
        return ENDS[name]
    layers, number, rest = name.split(".", 2)
    if layers != "layers":
        raise KeyError(name)
    its = TENSORS[rest]
    if its == "ffn_norm.weight":
        its = POST_NORM.get(architecture, its)
    return f"blk.{number}.{its}"


def _add_dimensions(writer: Any, config: dict[str, Any]) -> None:
    from gguf import LlamaFileType

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)


def _add_experts(writer: Any, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_recurrence(writer: Any, config: dict[str, Any]) -> None:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    assert keys == values, "llama.cpp has value heads in another order then"
    factor = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * factor))
    writer.add_rope_dimension_sections(ROPE_SECTIONS)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * config["linear_value_head_dim"])


def _add_tokenizer(writer: Any, model: Path, vocab_size: int) -> None:
    """Type words that only fill the vocabulary as NORMAL: llama.cpp writes no text of others."""
    from gguf import TokenType

    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    words = [""] * vocab_size
    for word, number in tokenizer["model"]["vocab"].items():
        words[number] = word
    types = [TokenType.NORMAL] * vocab_size
    for added in tokenizer["added_tokens"]:
        words[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges([NO_MERGE])
    writer.add_eos_token_id(words.index(settings["eos_token"]))
    writer.add_pad_token_id(words.index(settings["pad_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def _add_tensor(writer: Any, name: str, array: mx.array) -> None:
    """Store matrices in bfloat16, and vectors, convolutions and routers in float32, as llama.cpp
    wants them. A state's decay is stored without its logarithm."""
    from gguf import GGMLQuantizationType

    if name.endswith(".ssm_a"):
        array = -mx.exp(array.astype(mx.float32))
    if name.endswith("ssm_conv1d.weight"):
        array = array.squeeze(-1)
    narrow = ("ssm_conv1d.weight", "ffn_gate_inp.weight")
    if array.ndim < 2 or name.endswith(narrow):
        writer.add_tensor(name, np.array(array.astype(mx.float32)))
        return
    bits = np.array(array.astype(mx.bfloat16).view(mx.uint16))
    writer.add_tensor(name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)


SERVING = ModelSpec(vocab_size=1024)
# Huggingface's Qwen/Qwen3-0.6B.
QWEN3_0_6B = ModelSpec(
    num_hidden_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
)
QUANTISED_BITS, QUANTISED_GROUP = 4, 64
ROUTER_BITS = 8
ASCII = 128
Weights = dict[str, mx.array]
Config = dict[str, Any]
# The chat template around a question: its roles, byte by byte, and its special tokens.
TEMPLATE_TOKENS = 19


A3B = PUBLISHED["Qwen3-30B-A3B"]
# Answers have no end only where the embedding is the head.
KINDS = {
    "qwen3-0.6b": Published(QWEN3_0_6B),
    "qwen3.5-0.8b": PUBLISHED["Qwen3.5-0.8B"],
    "qwen3-30b-a3b-eighth": replace(
        A3B, spec=replace(A3B.spec, num_hidden_layers=6, tie_word_embeddings=True)
    ),
}
"""Models that servers are compared on."""


def write_endless_model(
    folder: Path, spec: ModelSpec, dtype: str = "float32", **fields: Any
) -> Path:
    """A model folder with tied embeddings. fields: as for write_model.

    A row of zeros in the tied embedding gives a logit of exactly 0, which is never the largest of
    dozens of random ones. All are such but letters and signs of one byte, because other tokens end
    an answer, open a reasoning part, are held back as half a character, or are other tokens when a
    client sends their text back.
    """
    assert spec.tie_word_embeddings
    write_model(folder, spec, dtype=dtype, **fields)
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    silent = ~mx.array(_letters(spec.vocab_size))
    (name,) = (name for name in weights if name.endswith(EMBEDDING))
    weights[name] = mx.where(silent[:, None], 0.0, weights[name])
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return folder


class ModelStore:
    """The same weights in several forms below one folder, made once and used by every run after."""

    def __init__(self, folder: Path, kind: Published) -> None:
        self._folder = folder
        self._kind = kind

    @property
    def is_read_whole(self) -> bool:
        """Return whether a token's step reads all weights, not those of chosen experts alone."""
        return "num_experts" not in self._kind.fields

    def bfloat16(self) -> Path:
        def write(folder: Path) -> None:
            write_endless_model(folder, self._kind.spec, "bfloat16", **self._kind.fields)

        return self._made("-bfloat16", write)

    def quantised(self, bits: int = QUANTISED_BITS) -> Path:
        return self._made(f"-{bits}-bit", lambda folder: quantise(self.bfloat16(), folder, bits))

    def gguf(self) -> Path:
        """Raises ImportError without the package ``gguf``."""
        return self._made(".gguf", lambda file: write_gguf(self.bfloat16(), file))

    def gguf_quantised(self, llama_quantize: Path) -> Path:
        """Return llama.cpp's 4 bits in groups of 32, made by its own program: an embedding that is
        the head too has 6. Raises ImportError, and CalledProcessError."""

        def write(file: Path) -> None:
            command = [str(llama_quantize), str(self.gguf()), str(file), "q4_0"]
            subprocess.run(command, check=True, capture_output=True)

        return self._made("-q4_0.gguf", write)

    def _made(self, ending: str, write: Callable[[Path], object]) -> Path:
        """Write a file whole or not at all, so that an interrupted run leaves nothing that looks
        right."""
        dimensions = "-".join(str(number) for number in asdict(self._kind.spec).values())
        family = self._kind.fields.get("model_type", "qwen3")
        path = self._folder / f"{family}-{dimensions}{ending}"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as made:
                write(Path(made) / path.name)
                (Path(made) / path.name).rename(path)
        return path


def quantise(source: Path, made: Path, bits: int = QUANTISED_BITS) -> Path:
    """Pack every matrix of a model as MLX does."""
    shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    packed = _quantised(weights, config, bits)
    mx.save_safetensors(str(made / "model.safetensors"), packed, {"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config, indent=1))
    return made


def _quantised(weights: Weights, config: Config, usual_bits: int) -> Weights:
    """Pack every matrix, the embedding among them; routers in 8 bits, as mlx-lm has them. config
    gets the fields for reading them."""
    quantization: Config = {"group_size": QUANTISED_GROUP, "bits": usual_bits}
    packed: Weights = {}
    for name, array in weights.items():
        if array.ndim < 2 or "conv1d" in name:
            packed[name] = array
            continue
        module, bits = name.removesuffix(".weight"), usual_bits
        if module.endswith(".mlp.gate"):
            bits = ROUTER_BITS
            quantization[module] = {"group_size": QUANTISED_GROUP, "bits": bits}
        parts = mx.quantize(array, QUANTISED_GROUP, bits)
        for part, values in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{module}.{part}"] = values
    config["quantization"] = quantization
    return packed


def weight_bytes(model: Path) -> int:
    """Return the bytes of all weights, which a token's step reads once: a tied embedding is the
    head too. model: a folder, or a GGUF file."""
    files = list(model.glob("*.safetensors")) if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files)


def _letters(vocab_size: int) -> list[bool]:
    """Return for each token whether it is printable ASCII: the sorted byte-level alphabet begins
    with it."""
    printable = ASCII - ord("!") - 1
    return [number < printable for number in range(vocab_size)]
