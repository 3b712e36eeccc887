"""A model from its ``config.json`` alone: enough to plan for weights one does not have."""

from dataclasses import dataclass
from pathlib import Path

from engine.models.config import ModelConfig, Quantization
from engine.models.families import read_spec
from engine.models.spec import ModelSpec
from engine.models.tensors import model_tensors


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, how many numbers its weights are, and how they are packed."""

    spec: ModelSpec
    matrix_numbers: int
    """Of all matrices, the embedding included: what quantisation packs."""
    vector_numbers: int
    """Of all norms and biases, which stay in 16 bits."""
    quantization: Quantization | None
    """How ``config.json`` says that the matrices are packed."""

    @property
    def parameters(self) -> int:
        return self.matrix_numbers + self.vector_numbers

    @property
    def kv_numbers_per_token(self) -> int:
        return sum(2 * its.kv_heads * its.head_dim for its in self.spec.attentions)

    @property
    def max_position_embeddings(self) -> int:
        return self.spec.max_position_embeddings


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a folder; of its files only ``config.json`` is opened.

    Raises CheckpointError with one sentence that names file and field.
    """
    config = ModelConfig(path)
    spec = read_spec(config)
    tensors = model_tensors(spec, with_head=not spec.tied_embeddings)
    return ModelShape(
        spec=spec,
        matrix_numbers=tensors.count(2),
        vector_numbers=tensors.count(1),
        quantization=config.quantization(tensors.embedding.name),
    )
