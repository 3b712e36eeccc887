"""The names of experts' tensors in each of the three conventions that checkpoints use."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.models.safetensors_headers import CheckpointError

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


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """The weights of the same linear layer in all experts."""

    name: str
    """The name of the linear layer. With ExpertNames.APART, it lacks the expert's number."""
    experts: int
    outputs: int
    inputs: int
    names: ExpertNames

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
        return dict.fromkeys(self.weights, (*experts, self.outputs, self.inputs))


def expert_matrices(
    layer: str, names: ExpertNames, experts: int, hidden: int, inner: int
) -> tuple[tuple[ExpertMatrix, ...], ExpertMatrix]:
    """Return the gate and up-projections (joined in one stack if FUSED) and the down-projection."""
    at = f"{layer}.{STACK if names is ExpertNames.STACKED else EXPERTS}"
    down = ExpertMatrix(f"{at}.down_proj", experts, hidden, inner, names)
    if names is ExpertNames.FUSED:
        return (ExpertMatrix(f"{at}.gate_up_proj", experts, 2 * inner, hidden, names),), down
    gate, up = (
        ExpertMatrix(f"{at}.{which}_proj", experts, inner, hidden, names)
        for which in ("gate", "up")
    )
    return (gate, up), down


def find_expert_names(tensors: Iterable[str]) -> ExpertNames:
    for name in tensors:
        if f".{EXPERTS}." in name:
            fused = name.endswith((".gate_up_proj", ".down_proj"))
            return ExpertNames.FUSED if fused else ExpertNames.APART
    return ExpertNames.STACKED


def refuse_grouped_apart(path: Path, names: ExpertNames, tensors: Iterable[str]) -> None:
    """Raise CheckpointError if each expert was quantized in tensors of its own."""
    if names is not ExpertNames.APART:
        return
    for name in tensors:
        if f".{EXPERTS}." in name and name.endswith(".scales"):
            raise CheckpointError(
                f"{path}: the tensor {name} is of one expert; quire serves packed experts as MLX "
                "stores them, all in one tensor"
            )
