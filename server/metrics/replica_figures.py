"""What is shown of each replica of a cluster to people who look at its page."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """A replica as it was when it said so last. One that has said nothing yet has no host, and its
    counts are 0."""

    name: str
    host: str | None
    """The name of its machine."""
    state: Literal["up", "silent", "starting"]
    """Whether it answers, answers no more, or has not answered yet."""
    heard_s_ago: float | None
    """How old all of this is."""
    running: int = 0
    waiting: int = 0
    capacity: int = 0
    """Requests that may run or wait there at the same time."""
    free_blocks: int = 0
    """Of the KV cache: blocks that hold nothing."""
    cached_blocks: int = 0
    """Those that are kept for prompts which begin alike, and go where others need them."""
    total_blocks: int = 0
    prompt_tokens: int = 0
    """Of all prompts that it was given."""
    cached_tokens: int = 0
    """Those of them that its cache had."""
    generated_tokens: int = 0


ListReplicas = Callable[[], list[ReplicaFigures]]
