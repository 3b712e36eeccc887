"""Reads which layers of a model attend to a window only."""

from collections.abc import Sequence

from engine.models.config import ModelConfig
from engine.models.safetensors_headers import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(config: ModelConfig, every: int) -> list[int | None]:
    """Return each layer's window, or None for all tokens. Without ``layer_types``, one layer of
    ``every`` sees all tokens, the last. Raises CheckpointError."""
    layers = range(1, config.count("num_hidden_layers") + 1)
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if number % every else FULL for number in layers]
    known = isinstance(kinds, Sequence) and all(kind in (SLIDING, FULL) for kind in kinds)
    if not known or len(kinds) != len(layers):
        raise CheckpointError(
            f"{config.file}: layer_types must be {SLIDING} or {FULL}, of {len(layers)} layers"
        )
    window = config.count("sliding_window")
    return [window if kind == SLIDING else None for kind in kinds]
