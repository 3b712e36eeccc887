"""Reads and checks the fields of a model folder's ``config.json``."""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from engine.models.safetensors_headers import CheckpointError, read_json

AFFINE = "affine"
MXFP4 = "mxfp4"
MAX_NUMBER = 2**63
# The bits and group sizes of each of MLX's quantization modes (mlx.core.quantize).
MODES = {
    AFFINE: ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    MXFP4: ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """MLX's way of quantizing a layer. Affine mode has integer codes, with a scale and a bias per
    group of weights. Other modes have small floats, with a scale per group."""

    bits: int
    group_size: int
    mode: str = AFFINE


PACKINGS = tuple(
    Quantization(bits, group_size, mode)
    for mode, (all_bits, group_sizes) in MODES.items()
    for bits in all_bits
    for group_size in group_sizes
)


class ModelConfig:
    """The fields of ``config.json``. Methods raise CheckpointError if a field is wrong."""

    def __init__(self, path: Path) -> None:
        self.file = path / "config.json"
        self.values = read_json(self.file)

    @property
    def text(self) -> "ModelConfig":
        """Return the config of the text model. Fields of ``text_config`` replace other fields."""
        nested = self.values.get("text_config", {})
        if not isinstance(nested, dict):
            raise self._wrong("text_config", nested, "an object")
        text = copy(self)
        text.values = self.values | nested
        return text

    def count(self, field: str, default: int | None = None) -> int:
        """Return a field that must be a positive integer. A missing field has the ``default``."""
        value = self.values.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(field, value, "a number above 0")
        return value

    def number(self, field: str, value: object = ...) -> float:
        """Return the field (or ``value``, if given), which must be a positive number."""
        if value is ...:
            value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(field, value, "a number above 0")
        # Python's JSON parser accepts NaN, Infinity, and integers too large for a float.
        if not 0 < value < MAX_NUMBER:
            raise self._wrong(field, value, "a number above 0")
        return value

    def flag(self, field: str, default: bool | None = None) -> bool:
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def check_multiple(self, field: str, count: int, unit_field: str, unit: int) -> None:
        if count % unit:
            raise CheckpointError(
                f"{self.file}: {field} ({count}) is not a multiple of {unit_field} ({unit})"
            )

    def check_choice(self, field: str, value: object, choices: Collection[object]) -> None:
        if value not in choices:
            raise self._wrong(field, value, " or ".join(map(str, choices)))

    def refuse_windows(self) -> None:
        if self.values.get("use_sliding_window"):
            raise CheckpointError(
                f"{self.file}: use_sliding_window is true; quire serves full attention only"
            )

    def refuse_foreign_quantization(self) -> None:
        packing = self.values.get("quantization_config")
        method = packing.get("quant_method") if isinstance(packing, dict) else None
        if method not in (None, MXFP4) and "quantization" not in self.values:
            raise CheckpointError(
                f"{self.file}: quantization_config.quant_method is {method!r}; quire serves "
                "unquantised models and those that MLX has packed: look for this one in 4 bits at "
                "huggingface.co/mlx-community"
            )

    def quantization(self, layer: str) -> Quantization | None:
        default = self.values.get("quantization")
        if not isinstance(default, dict):
            blocks = isinstance(self.values.get("quantization_config"), dict)
            return Quantization(4, 32, MXFP4) if blocks and ".experts." in layer else None
        chosen = default[layer] if self.names_layer(layer) else default
        mode = chosen.get("mode", AFFINE)
        if not isinstance(mode, str) or mode not in MODES:
            raise self._wrong("quantization.mode", mode, f"one of {', '.join(MODES)}")
        try:
            packing = Quantization(int(chosen["bits"]), int(chosen["group_size"]), mode)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{self.file}: quantization needs the numbers bits and group_size"
            ) from error
        bits, group_sizes = MODES[mode]
        self.check_choice("quantization.bits", packing.bits, bits)
        self.check_choice("quantization.group_size", packing.group_size, group_sizes)
        return packing

    def names_layer(self, layer: str) -> bool:
        """Return True if the config states a quantization for this layer by name."""
        default = self.values.get("quantization")
        return isinstance(default, dict) and isinstance(default.get(layer), dict)

    def _wrong(self, field: str, value: object, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {field} is {value!r}; it must be {what}")
