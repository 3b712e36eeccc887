"""Random models that never end an answer by themselves, and whose every token is whole text."""

from pathlib import Path

import mlx.core as mx

from tests.models import (
    BYTE_TOKENS,
    PLAIN_ADDED_TOKENS,
    SPECIAL_TOKENS,
    ModelSpec,
    write_model,
)

SERVING = ModelSpec(vocab_size=1024)
INTERFERENCE = ModelSpec(
    num_hidden_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=512,
    vocab_size=4096,
)
EMBEDDING = "model.embed_tokens.weight"
ASCII = 128
# What the chat template puts around a question: its roles, byte by byte, and its special tokens.
TEMPLATE_TOKENS = 19


def write_endless_model(folder: Path, spec: ModelSpec) -> Path:
    """A float32 model folder with tied embeddings.

    A row of zeros in the tied embedding gives a logit of exactly 0, which is never the largest of
    hundreds of random ones. Such rows are: tokens that end an answer, because not every server can
    be told to ignore them; tokens that open a reasoning part; bytes that are no character alone,
    because servers hold back half a character and times between texts would measure that.
    """
    assert spec.tie_word_embeddings
    write_model(folder, spec)
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    silent = mx.arange(spec.vocab_size) < BYTE_TOKENS + len(SPECIAL_TOKENS + PLAIN_ADDED_TOKENS)
    silent = silent & ~mx.array(_letters(spec.vocab_size))
    weights[EMBEDDING] = mx.where(silent[:, None], 0.0, weights[EMBEDDING])
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
    return folder


def _letters(vocab_size: int) -> list[bool]:
    """Which tokens are printable ASCII: the byte-level alphabet, sorted, begins with them."""
    printable = ASCII - ord("!") - 1
    return [number < printable for number in range(vocab_size)]
