"""The settings of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine; None means that the engine chooses."""

    substrate: str
    """"auto", or what a Substrate is called."""
    release_heaps: bool
    """Whether a GPU may release heaps before the process ends."""
    residency_keep_s: float
    """How long after the last step a GPU's memory is kept ready for the next one."""
    kv_dtype: str | None
    """"bfloat16", "float32", or on a GPU "float16"."""
    page_bytes: int | None
    heap_bytes: int
    kv_budget_bytes: int | None
    free_slack_bytes: int
    headroom_bytes: int | None
    mlx_cache_bytes: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    step_time_target_ms: float
    threads: int | None
    idle_release_s: float
    prefix_cache: bool
    prefix_keep_s: float
    max_sharers: int
    check_every_step: bool
    max_step_mask_s: float
    """Processor time of all masks of a step."""
    grammar_bytes: int
    """Memory that is kept for compiled grammars."""
    overlap: bool
    """Whether the next step is built and begun while one runs."""
