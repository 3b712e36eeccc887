"""A model's dimensions from ``config.json`` alone: enough to plan for weights one does not have."""

import math
from dataclasses import dataclass
from pathlib import Path

from engine.model_config import Dimensions, ModelConfig, Quantization, expected_shapes


@dataclass(frozen=True, slots=True)
class ModelShape(Dimensions):
    """And how many numbers the weights are."""

    matrix_numbers: int
    """Of all matrices, the embedding included: what quantisation packs."""
    vector_numbers: int
    """Of all norms, which stay in 16 bits."""
    quantization: Quantization | None
    """How ``config.json`` says that the matrices are packed."""

    @property
    def parameters(self) -> int:
        """Return how many numbers the weights have."""
        return self.matrix_numbers + self.vector_numbers

    @property
    def kv_numbers_per_token(self) -> int:
        """Return how many numbers one token's K and V have in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a folder; of its files only ``config.json`` is opened.

    Raises CheckpointError with one sentence that names file and field.
    """
    config = ModelConfig(path)
    untied = not config.flag("tie_word_embeddings")
    shapes = [shape for _, shape in expected_shapes(config, with_head=untied)]
    return ModelShape(
        **config.dimensions(),
        matrix_numbers=sum(math.prod(shape) for shape in shapes if len(shape) == 2),
        vector_numbers=sum(math.prod(shape) for shape in shapes if len(shape) == 1),
        quantization=config.quantization("model.embed_tokens"),
    )
