"""A model of the benchmark as GGUF, for servers that read nothing else: ``python -m
tests.bench.gguf MODEL OUT.gguf``.

Needs the package ``gguf``, which quire does not depend on: ``pip install gguf``. For 4 bits, give
the file to llama.cpp: ``llama-quantize OUT.gguf OUT-q4_0.gguf q4_0``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

ARCHITECTURE = "qwen3"
TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
# A file has to have merges. This one joins bytes that no text has, to a token that there is not.
NO_MERGE = "\u0100 \u0100"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gguf", description=__doc__)
    parser.add_argument("model", type=Path, help="a folder with bfloat16 or float32 weights")
    parser.add_argument("out", type=Path, help="the file to write")
    asked = parser.parse_args(arguments)
    try:
        write_gguf(asked.model, asked.out)
    except ImportError:
        print("the package gguf is missing: pip install gguf", file=sys.stderr)
        return 1
    return 0


def write_gguf(model: Path, out: Path) -> None:
    """Raises ImportError without the package ``gguf``, and KeyError for weights that are packed."""
    from gguf import GGUFWriter

    config = json.loads((model / "config.json").read_text())
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    writer = GGUFWriter(str(out), ARCHITECTURE)
    _add_dimensions(writer, config)
    _add_tokenizer(writer, model, config["vocab_size"])
    for name, array in sorted(weights.items()):
        _add_tensor(writer, tensor_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(name: str) -> str:
    """What GGUF calls a weight. Raises KeyError when it has no name for it."""
    if name in ENDS:
        return ENDS[name]
    _, layers, number, rest = name.split(".", 3)
    if layers != "layers" or not rest.endswith(".weight"):
        raise KeyError(name)
    return f"blk.{number}.{TENSORS[rest.removesuffix('.weight')]}.weight"


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
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: Any, model: Path, vocab_size: int) -> None:
    """Words that only fill the vocabulary are typed NORMAL: of others llama.cpp writes no text."""
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
    """Matrices in bfloat16, vectors in float32, as llama.cpp wants them."""
    from gguf import GGMLQuantizationType

    if array.ndim < 2:
        writer.add_tensor(name, np.array(array.astype(mx.float32)))
        return
    bits = np.array(array.astype(mx.bfloat16).view(mx.uint16))
    writer.add_tensor(name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)


if __name__ == "__main__":
    sys.exit(main())
