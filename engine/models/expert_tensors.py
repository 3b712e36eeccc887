"""The names of experts' tensors in each of the three conventions that checkpoints use."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import mlx.core as mx

from engine.models.safetensors_headers import CheckpointError, Tensor

STACK = "mlp.switch_mlp"
EXPERTS = "mlp.experts"


class ExpertNames(Enum):
    """The convention by which a checkpoint names the weights of experts."""

    STACKED = "stacked"
    """The convention of MLX: ``mlp.switch_mlp.gate_proj.weight [experts, outputs, inputs]``."""
    APART = "apart"
    """Qwen3's convention, with a tensor per expert: ``mlp.experts.7.gate_proj.weight``."""
    FUSED = "fused"
    """Qwen3.5's convention: ``mlp.experts.gate_up_proj [experts, outputs, inputs]``, gate first."""
    ALTERNATING = "alternating"
    """gpt-oss's: ``mlp.experts.gate_up_proj.weight``, whose rows are of gate and of up in turn."""


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """The weights of the same linear layer in all experts."""

    name: str
    """The name of the linear layer. With ExpertNames.APART, it lacks the expert's number."""
    experts: int
    outputs: int
    inputs: int
    names: ExpertNames
    has_bias: bool = False
    alternates: bool = False
    """Whether rows of gate and up alternate in the files. Reading sorts them, gate first."""

    @property
    def layers(self) -> list[str]:
        """Return the layers' names in the files: one name, or one per expert if APART."""
        if self.names is not ExpertNames.APART:
            return [self.name]
        above, _, last = self.name.rpartition(".")
        return [f"{above}.{number}.{last}" for number in range(self.experts)]

    @property
    def weights(self) -> list[str]:
        end = "" if self.names is ExpertNames.FUSED else ".weight"
        return [f"{layer}{end}" for layer in self.layers]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        experts = () if self.names is ExpertNames.APART else (self.experts,)
        weights = dict.fromkeys(self.weights, (*experts, self.outputs, self.inputs))
        bias = {f"{self.name}.bias": (self.experts, self.outputs)} if self.has_bias else {}
        return weights | bias


def expert_matrices(
    layer: str, names: ExpertNames, experts: int, hidden: int, inner: int, *, biases: bool = False
) -> tuple[tuple[ExpertMatrix, ...], ExpertMatrix]:
    """Return the gate and up-projections (joined in one stack if FUSED or ALTERNATING) and the
    down-projection. Experts with biases are gpt-oss's, which MLX does not rename."""
    at = f"{layer}.{EXPERTS if biases or names is not ExpertNames.STACKED else STACK}"
    down = ExpertMatrix(f"{at}.down_proj", experts, hidden, inner, names, biases)
    if names in (ExpertNames.FUSED, ExpertNames.ALTERNATING):
        alternates = names is ExpertNames.ALTERNATING
        both = f"{at}.gate_up_proj"
        return (ExpertMatrix(both, experts, 2 * inner, hidden, names, biases, alternates),), down
    gate, up = (
        ExpertMatrix(f"{at}.{which}_proj", experts, inner, hidden, names, biases)
        for which in ("gate", "up")
    )
    return (gate, up), down


def find_expert_names(tensors: Iterable[str]) -> ExpertNames:
    for name in tensors:
        _, within, place = name.partition(f".{EXPERTS}.")
        if place.startswith("gate_up_proj."):
            return ExpertNames.ALTERNATING
        if place in ("gate_up_proj", "down_proj"):
            return ExpertNames.FUSED
        if within and place[0].isdigit():
            return ExpertNames.APART
    return ExpertNames.STACKED


# The ends of the names that the hub has for experts in MXFP4, and MLX's. A block is 16 bytes.
BLOCK_NAMES = {"_blocks": ".weight", "_scales": ".scales", "_bias": ".bias"}


def named_as_mlx(name: str) -> str:
    """Return MLX's name for a tensor of experts in blocks, and any other name unchanged."""
    end = next((end for end in BLOCK_NAMES if f".{EXPERTS}." in name and name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + BLOCK_NAMES[end]


def headers_by_mlx(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of files as ``arrays_by_mlx`` changes them."""
    return {
        named_as_mlx(name): replace(tensor, dtype="U32", shape=_words(tensor.shape))
        if name.endswith("_blocks")
        else tensor
        for name, tensor in tensors.items()
    }


def _words(shape: tuple[int, ...]) -> tuple[int, ...]:
    *rows, groups, bytes_of_group = shape
    return (*rows, groups * bytes_of_group // 4)


def arrays_by_mlx(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return experts in blocks ``[..., groups, 16]`` uint8 as MLX has them: words ``[..., words]``
    uint32, under its names."""
    return {
        named_as_mlx(name): array.view(mx.uint32).flatten(-2) if name.endswith("_blocks") else array
        for name, array in arrays.items()
    }


def refuse_unread_experts(path: Path, names: ExpertNames, tensors: Collection[str]) -> None:
    """Raise CheckpointError if each expert was quantized in tensors of its own, or if gpt-oss's are
    not quantized (which mlx-lm does not read, either)."""
    for name in tensors:
        if name.endswith(f".{EXPERTS}.gate_up_proj.bias") and name.removesuffix(".bias") in tensors:
            raise CheckpointError(
                f"{path}: the tensor {name.removesuffix('.bias')} is not quantized; quire serves "
                "gpt-oss with experts in MXFP4, as OpenAI publishes it, or as MLX stores it"
            )
        if names is ExpertNames.APART and f".{EXPERTS}." in name and name.endswith(".scales"):
            raise CheckpointError(
                f"{path}: the tensor {name} is of one expert; quire serves packed experts as MLX "
                "stores them, all in one tensor"
            )
