"""The settings of an engine: table [engine] of the settings file, and the cache's settings."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from kvcache.config import FIXED as FIXED
from kvcache.config import MIB, Fixed
from kvcache.config import CacheSettings as CacheSettings

# The limit of memory for compiled grammars, both cached grammars and grammars of running answers.
GRAMMAR_BYTES = 128 * MIB
Activations = Literal["auto", "float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(CacheSettings):
    """The settings of an engine and its cache. A setting that is None gets a value at the start."""

    max_num_seqs: Annotated[int, Ge(1), Le(4096)] = 32
    max_num_batched_tokens: Annotated[int, Ge(1), Le(65536)] = 2048
    max_model_len: Annotated[int, Ge(2)] | None = None
    step_time_target_ms: Annotated[float, Gt(0)] = 100.0
    threads: Annotated[int, Ge(1), Le(256)] | None = None
    instruction_set: str = "auto"
    """The instruction set of the CPU's kernels; "auto" chooses the best one."""
    activations: Activations = "auto"
    """The type to which a CPU may round activations before products with weights: "float32" rounds
    nothing, "auto" rounds where that is fast and loses less quality than mlx-lm's bfloat16."""
    mlx_cache_bytes: int = 256 * MIB
    residency_keep_s: Annotated[float, Ge(0), Le(86_400)] = 180.0
    """How long the GPU's memory stays resident after the last step."""
    overlap: bool = True
    """Whether to begin the next step while one runs."""
    drafts: bool = True
    """Whether to guess tokens that may follow, and to check several of them in one step. A GPU does
    only if that changes no bits of the loaded model."""
    check_every_step: bool = False
    """Whether to check the cache's invariants after every step, not only when idle."""
    max_step_mask_s: Fixed[float] = 0.05
    """The limit of processor time for a step's masks; above it, some sequences skip the step."""
    grammar_bytes: Fixed[int] = GRAMMAR_BYTES
