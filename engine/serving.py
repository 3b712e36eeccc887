"""What a server asks of an engine, whether that runs on a thread of its process or elsewhere."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.memory_map import MemoryMap
from engine.token_stream import TokenStream
from engine.types import (
    NO_SALT,
    NO_TURNS,
    EngineLimits,
    EngineStats,
    PrefixSalt,
    SamplingParams,
    TokenConstraint,
    Turns,
)


class ServingEngine(Protocol):
    """Answers prompts. ``engine/client.py`` says what each method does; all are called on the event
    loop."""

    def attach(self) -> None:
        """Deliver events to the running event loop from now on."""

    def end_all(self, message: str) -> None:
        """End all requests with an error, and admit no more."""

    @property
    def alive(self) -> bool:
        """Return whether prompts can be answered."""

    @property
    def pressure(self) -> int:
        """Return how short of memory the system is: a level of engine/pressure.py."""

    @property
    def limits(self) -> EngineLimits:
        """Return the limits that requests are checked against."""

    @property
    def stats(self) -> EngineStats:
        """Return the newest snapshot, without waiting."""

    @property
    def step_age_s(self) -> float:
        """Return how long there has been something to do and no step was completed; else 0."""

    @property
    def in_flight(self) -> int:
        """Return how many requests have not ended."""

    @property
    def max_share(self) -> int:
        """Return how many requests of one tenant may run or wait at the same time."""

    def check_room(self, requests: int, tenant: bytes) -> None:
        """Check that so many more requests fit. Raises QueueFullError and ShareFullError."""

    async def memory_map(self) -> MemoryMap:
        """Return what the memory holds. Raises EngineDeadError."""

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, **options: Any
    ) -> TokenStream:
        """Hand over one request. options, errors: those of ``submit_choices``."""

    def submit_choices(
        self,
        prompt_ids: tuple[int, ...],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        salt: PrefixSalt = NO_SALT,
        system_tokens: int = 0,
        turns: Turns = NO_TURNS,
        constraint: TokenConstraint | None = None,
        pooling: bool = False,
        read_with: TokenStream | None = None,
        beyond_queue: bool = False,
        name: str = "unnamed",
    ) -> list[TokenStream]:
        """Hand over one request for each of ``params``, all with the same prompt; or none of them.
        Raises PromptTooLongError, QueueFullError, EngineDeadError."""
