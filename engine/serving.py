"""What a server asks of an engine, whether that runs on a thread of its process or elsewhere."""

from typing import Any, Protocol

from engine.client import TokenStream
from engine.memory_map import MemoryMap
from engine.types import EngineLimits, EngineStats, SamplingParams, Submission


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
        """Return how short of memory the system is: a level of engine/machine.py."""

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
        """Hand over one request. options: other fields of its Submission. Raises as
        ``submit_choices`` does."""

    def submit_choices(
        self, asked: Submission, read_with: TokenStream | None = None
    ) -> list[TokenStream]:
        """Hand over one request for each of ``asked.params``; or none of them. read_with: a stream
        that these are read together with. Raises PromptTooLongError, QueueFullError,
        EngineDeadError."""
