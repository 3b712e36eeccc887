"""Reads rotary position embeddings (RoPE) from ``config.json``. The formulas are from the paper of
each kind of scaling. The defaults are the same as in mlx-lm."""

import math
from typing import Any

from engine.models.config import ModelConfig
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Rope

PLAIN = ("default", "mrope")
"""The kinds of RoPE without scaling. (The three positions of mrope are equal for text.)"""
YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")
ORIGINAL = "original_max_position_embeddings"


def read_context(config: ModelConfig) -> int:
    """Return the model's longest context in tokens. With YaRN, this is the trained context times
    ``factor``, even if max_position_embeddings is less, as in vLLM. Raises CheckpointError."""
    known, fields = config.count("max_position_embeddings"), _Fields(config)
    if fields.kind in YARN and ORIGINAL in fields.values:
        known = max(known, int(fields.number("factor") * fields.number(ORIGINAL)))
    return known


def rope_number(
    config: ModelConfig, field: str, default: float | None = None, *, parameters_first: bool = False
) -> float:
    """Return a number from the top level of the config or from ``rope_parameters``. If both have
    one, ``parameters_first`` prefers ``rope_parameters``. Raises CheckpointError."""
    nested = config.values.get("rope_parameters")
    places = [config.values, nested if isinstance(nested, dict) else {}]
    values = [place.get(field) for place in (reversed(places) if parameters_first else places)]
    return config.number(field, next((value for value in values if value is not None), default))


def read_rope(
    config: ModelConfig,
    head_dim: int,
    theta: float | None = None,
    *,
    parameters_first: bool = False,
) -> Rope:
    """Return the RoPE of attention heads. ``theta`` is the default for the base. With
    ``parameters_first``, ``rope_parameters`` overrides the top level. Raises CheckpointError."""
    base = rope_number(config, "rope_theta", theta, parameters_first=parameters_first)
    fields = _Fields(config)
    try:
        return _rope(base, head_dim, fields)
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{config.file}: with the numbers of rope_scaling no angle can be computed"
        ) from error


def _rope(base: float, head_dim: int, fields: "_Fields") -> Rope:
    kind = fields.kind
    if kind in PLAIN:
        return Rope(base)
    if kind == "linear":
        return Rope(base, scale=1 / fields.number("factor"))
    periods = [base ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
    if kind == "llama3":
        return Rope(base, periods=_llama3(periods, fields))
    if kind in YARN:
        return _yarn(base, periods, fields)
    if kind == "longrope":
        return _longrope(base, periods, fields)
    if kind == "proportional":
        return Rope(base, periods=_proportional(periods, fields))
    raise CheckpointError(
        f"{fields.config.file}: rope_scaling.type is {kind!r}, which quire does not serve"
    )


class _Fields:
    """The fields of ``rope_scaling``, or of ``rope_parameters`` if there is no ``rope_scaling``."""

    def __init__(self, config: ModelConfig) -> None:
        values = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{config.file}: rope_scaling is no object")
        self.config = config
        self.values: dict[str, Any] = values
        self.kind = values.get("type") or values.get("rope_type", "default")

    def number(self, name: str, default: float | None = None) -> float:
        return self.config.number(f"rope_scaling.{name}", self.values.get(name, default))

    def numbers(self, name: str, count: int) -> list[float]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise CheckpointError(
                f"{self.config.file}: rope_scaling.{name} must be {count} numbers"
            )
        return [self.config.number(f"rope_scaling.{name}", one) for one in value]


def _llama3(periods: list[float], fields: _Fields) -> tuple[float, ...]:
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor", 1.0), fields.number("high_freq_factor", 4.0)
    known = fields.number(ORIGINAL, 8192)

    def stretched(period: float) -> float:
        waves = known / (2 * math.pi * period)  # in the trained context
        kept = min(max((waves - low) / (high - low), 0.0), 1.0)
        return period / ((1 - kept) / factor + kept)

    return tuple(map(stretched, periods))


def _yarn(base: float, periods: list[float], fields: _Fields) -> Rope:
    """Scale by YaRN (arXiv 2309.00071), which stretches periods of later pairs of dimensions."""
    factor, known = fields.number("factor"), fields.number(ORIGINAL, 4096)
    pairs = len(periods)

    def pair_of(turns: float) -> float:
        return pairs * math.log(known / (turns * 2 * math.pi)) / math.log(base)

    first = max(math.floor(pair_of(fields.number("beta_fast", 32))), 0)
    last = min(math.ceil(pair_of(fields.number("beta_slow", 1))), 2 * pairs - 1)

    def stretched(pair: int, period: float) -> float:
        kept = 1 - min(max((pair - first) / (last - first or 0.001), 0.0), 1.0)
        return period / ((1 - kept) / factor + kept)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over_all = fields.values.get("mscale_all_dim", 0)
    return Rope(
        base,
        periods=tuple(stretched(*pair) for pair in enumerate(periods)),
        magnitude=magnitude(fields.number("mscale", 1.0)) / magnitude(over_all),
    )


def _longrope(base: float, periods: list[float], fields: _Fields) -> Rope:
    """Scale by LongRoPE (arXiv 2402.13753). Use the factors for long contexts at any length."""
    known = fields.number(ORIGINAL)
    factors = fields.numbers("long_factor", len(periods))
    longer = fields.config.count("max_position_embeddings") / known
    return Rope(
        base,
        periods=tuple(factor * period for factor, period in zip(factors, periods, strict=True)),
        magnitude=math.sqrt(1 + math.log(longer) / math.log(known)) if longer > 1 else 1.0,
    )


def _proportional(periods: list[float], fields: _Fields) -> tuple[float, ...]:
    """Return periods that are infinite for the last pairs of dimensions, which do not rotate."""
    factor = fields.number("factor", 1.0)
    turning = int(2 * len(periods) * fields.number("partial_rotary_factor", 1.0)) // 2
    still = len(periods) - turning
    return (*(factor * period for period in periods[:turning]), *[math.inf] * still)
