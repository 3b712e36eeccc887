"""The settings of an engine: table [engine] of the settings file, and the cache's settings."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from kvcache.config import FIXED as FIXED
from kvcache.config import MIB, Fixed
from kvcache.config import CacheSettings as CacheSettings

# For compiled grammars: the cached ones and the ones of running answers together.
GRAMMAR_BYTES = 128 * MIB
Activations = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(CacheSettings):
    """How the model runs, and how K and V lie in memory; None means that it is chosen at start."""

    max_num_seqs: Annotated[int, Ge(1), Le(4096)] = 32
    max_num_batched_tokens: Annotated[int, Ge(1), Le(65536)] = 2048
    max_model_len: Annotated[int, Ge(2)] | None = None
    step_time_target_ms: Annotated[float, Gt(0)] = 100.0
    threads: Annotated[int, Ge(1), Le(256)] | None = None
    instruction_set: str = "auto"
    """A name of a CPU's kernels; auto is the best one."""
    activations: Activations = "float32"
    """The type to which a CPU may round activations before it multiplies weights with them."""
    mlx_cache_bytes: int = 256 * MIB
    residency_keep_s: Annotated[float, Ge(0), Le(86_400)] = 180.0
    """How long after the last step a GPU's memory is kept ready for the next one."""
    overlap: bool = True
    """Whether the next step is built and begun while one runs."""
    check_every_step: bool = False
    """Whether the cache's invariants are checked after every step, not only when idle."""
    max_step_mask_s: Fixed[float] = 0.05
    """Processor time of all masks of a step: the costliest ones take turns."""
    grammar_bytes: Fixed[int] = GRAMMAR_BYTES
