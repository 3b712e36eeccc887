"""mlx-lm's models, with which ours are compared."""

import resource
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from engine.models.checkpoint import Checkpoint

# mlx_lm lowers the limit of open files for the whole process when it is imported.
with mock.patch.object(resource, "setrlimit"):
    from mlx_lm.models import gemma2
    from mlx_lm.models import prism_hadamard_qwen35 as prism
    from mlx_lm.models.base import create_causal_mask
    from mlx_lm.models.gemma3_text import clip_residual
    from mlx_lm.models.rope_utils import initialize_rope
    from mlx_lm.utils import _get_classes as classes_of
    from mlx_lm.utils import load_model

__all__ = [
    "classes_of",
    "clip_residual",
    "initialize_rope",
    "lazy_reference",
    "load_model",
    "load_reference",
]


class Float32Embedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """An embedding whose rows are float32, whatever the type of its scales."""

    def __call__(self, ids: mx.array) -> mx.array:
        rows: mx.array = super().__call__(ids)
        return rows.astype(mx.float32)


class Float32RotatedEmbedding(prism.HadamardQuantizedEmbedding):  # type: ignore[misc]
    """An embedding with a rotation whose rows are float32; mlx-lm's are float16."""

    def __call__(self, ids: mx.array) -> mx.array:
        parts = (self.weight[ids], self.scales[ids], self.biases[ids])
        rows = mx.dequantize(*parts, self.group_size, self.bits)
        rotated: mx.array = prism.hadamard_rotate(rows, self.block, self.signs, inverse=True)
        return rotated


class WindowedGemma2(gemma2.GemmaModel):  # type: ignore[misc]
    """Gemma 2 whose layers have windows as in transformers; in mlx-lm they see all tokens."""

    windows: tuple[int | None, ...]

    def __call__(self, inputs: mx.array, cache: None = None) -> mx.array:
        x = self.embed_tokens(inputs) * self.args.hidden_size**0.5
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, create_causal_mask(inputs.shape[1], window_size=window))
        states: mx.array = self.norm(x)
        return states


def load_reference(checkpoint: Checkpoint, *, stored: bool = False) -> Any:
    """Return mlx-lm's model in float32, with codes as they are: unpacked they would be rounded to
    the checkpoint's own 16 bits. stored: in the checkpoint's own dtype."""
    model = lazy_reference(checkpoint)
    text = getattr(model, "language_model", model).model
    if isinstance(text, gemma2.GemmaModel):
        text.__class__ = WindowedGemma2
        text.windows = tuple(each.window for each in checkpoint.spec.attentions)
    if not stored:
        model.set_dtype(mx.float32)
        embedding = text.embed_tokens
        for wide in (Float32Embedding, Float32RotatedEmbedding):
            if type(embedding) is wide.__base__:
                embedding.__class__ = wide
    mx.eval(model.parameters())
    return model


def lazy_reference(checkpoint: Checkpoint) -> Any:
    """Return mlx-lm's model as it is stored, before its weights are read."""
    # Without a head of its own the model is built as if it were tied.
    config = {"tie_word_embeddings": checkpoint.spec.tied_embeddings or checkpoint.embeds}
    model, _ = load_model(
        checkpoint.path,
        lazy=True,
        strict=True,
        model_config=config,
        get_model_classes=lambda config: _classes_of(checkpoint, config),
    )
    return model


def _classes_of(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes, of which the model takes the checkpoint's weights by their own names."""
    model, args = classes_of(config)

    class NamedModel(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Without the head that nobody uses."""
            own = getattr(super(), "sanitize", dict)  # Gemma 2's class has none
            kept: dict[str, mx.array] = own(weights)
            start = "model." if not checkpoint.naming.prefix else ""
            heads = {name for name in kept if name.startswith("lm_head.")}
            named = {start + name: kept[name] for name in kept.keys() - heads}
            return named if checkpoint.embeds else named | {name: kept[name] for name in heads}

    return NamedModel, args


def logits_of(checkpoint: Checkpoint, ids: list[int]) -> mx.array:
    """Return mlx-lm's logits after each token of a prompt, in float32."""
    found: mx.array = load_reference(checkpoint)(mx.array([ids]))[0].astype(mx.float32)
    return found
