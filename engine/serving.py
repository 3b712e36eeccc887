"""What a server asks of an engine, whether that runs on a thread of its process or elsewhere."""

from typing import Any, Protocol

from engine.client import TokenStream
from engine.memory_map import MemoryMap
from engine.types import EngineLimits, EngineStats, SamplingParams, Submission


class ServingEngine(Protocol):
    """Answers prompts. ``engine/client.py`` says what each method does; all are called on the event
    loop."""

    def attach(self) -> None: ...

    def end_all(self, message: str) -> None: ...

    @property
    def alive(self) -> bool: ...

    @property
    def pressure(self) -> int: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def step_age_s(self) -> float: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def max_share(self) -> int: ...

    def check_room(self, requests: int, tenant: bytes) -> None: ...

    async def memory_map(self) -> MemoryMap: ...

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, **options: Any
    ) -> TokenStream:
        """Hand over one request. options: other fields of its Submission. Raises as
        ``submit_choices`` does."""

    def submit_choices(
        self, submission: Submission, read_with: TokenStream | None = None
    ) -> list[TokenStream]:
        """Hand over one request for each of ``asked.params``; or none of them. read_with: a stream
        that these are read together with. Raises PromptTooLongError, QueueFullError,
        EngineDeadError."""
