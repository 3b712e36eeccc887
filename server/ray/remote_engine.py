"""The engines of a cluster as one: what the front of a server asks of an engine, it asks of this.

Each prompt goes to one replica, over a stream of its own. A replica that is silent, gone or full is
left out; a prompt of which no token has been delivered goes to another one, and all others end with
an error after which the client may ask again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from engine.client import Slots, TokenStream
from engine.errors import EngineDeadError
from engine.memory_map import MemoryMap
from engine.types import (
    BlockHashes,
    EngineLimits,
    EngineStats,
    FinishReason,
    Request,
    SamplingParams,
    Submission,
    TokenEvent,
)
from server.protocol.wire_errors import REPLICA_LOST, REPLICAS_FULL
from server.ray.membership import Membership
from server.ray.messages import Numbered, Refusal, Route, SentForm

# A replica that answers gives a sign of life every second.
SILENCE_S = 5.0
REPORT_PERIOD_S = 1.0
# A prompt is given to so many replicas, one after the other.
MAX_ATTEMPTS = 3
# Ray sends text as UTF-8; 20 bits of a hash fit behind what that has no bytes for.
BEHIND_SURROGATES = 0xE000

log = logging.getLogger(__name__)


class ReplicaError(Exception):
    """A replica is lost, or has no room: one of the two messages says which."""


class RayReplicas:
    """Calls methods of replicas by Ray's handle; ``router.py`` chooses which one's. What is raised
    means that one is lost."""

    def __init__(self, handle: Any) -> None:
        """handle: a DeploymentHandle."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        """Have a replica answer; leaving early aborts it."""
        response = self._streaming.generate.remote(route, submission)
        try:
            async for batch in response:
                yield batch
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise

    async def ask(self, method: str, route: Route) -> Any:
        response = self._handle.options(method_name=method).remote(route)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise


@dataclass(slots=True, eq=False)
class _Call:
    """A prompt on its way, and the streams of its answers."""

    submission: Submission
    streams: list[TokenStream]
    open: set[int]
    """The numbers of answers that somebody reads."""
    has_begun: bool = False
    """Whether an event has been delivered."""
    task: "asyncio.Task[None]" = field(init=False)


class RemoteEngine:
    """A ServingEngine whose engines are replicas. All methods run on the event loop."""

    def __init__(
        self,
        replicas: RayReplicas,
        *,
        max_backlog: int,
        max_share_ratio: float = 1.0,
        silence_s: float = SILENCE_S,
        report_period_s: float = REPORT_PERIOD_S,
    ) -> None:
        """max_backlog: events that a stream keeps for a slow reader. max_share_ratio: the part of
        all slots that one tenant may take. silence_s: after which a replica is lost."""
        self._replicas = replicas
        self._max_backlog = max_backlog
        self._silence_s = silence_s
        self._report_period_s = report_period_s
        self.members = Membership(silence_s + report_period_s, time.monotonic)
        self._slots = Slots(max_share_ratio)
        self._calls: dict[int, tuple[_Call, int]] = {}
        """By the number of a request: its prompt, and the number of the answer."""
        self._last_id = 0
        self._closed = False
        self._asking: asyncio.Task[None] | None = None
        self.retries = 0
        """Prompts that were given to another replica."""

    def attach(self) -> None:
        """Ask the replicas how they are, from now on."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._keep_asking())

    async def ready(self) -> None:
        """Wait until a replica has said how it is."""
        self.attach()
        while not self.members.alive:  # noqa: ASYNC110
            await asyncio.sleep(self._report_period_s / 10)

    def end_all(self, message: str) -> None:
        """End all requests with an error, and admit no more."""
        self._closed = True
        for call in {id(call): call for call, _ in self._calls.values()}.values():
            self._fail(call, message)
            call.task.cancel()
        if self._asking is not None:
            self._asking.cancel()

    async def _keep_asking(self) -> None:
        while True:
            await self.ask_all()
            await asyncio.sleep(self._report_period_s)

    async def ask_all(self) -> None:
        """Ask every replica how it is, and whom else there is."""
        routes = [Route(target=name) for name in self.members.names] or [Route()]
        await asyncio.gather(*map(self._ask, routes))
        # Who chooses says with every choice whom there is.
        if known := routes[-1].replicas:
            self.members.set_names(known)
            new = self.members.unheard
            await asyncio.gather(*(self._ask(Route(target=name)) for name in new))

    async def _ask(self, route: Route) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                self.members.hear(await self._replicas.ask("report", route))
        except Exception as error:
            log.info("a replica does not say how it is: %s", type(error).__name__)

    @property
    def alive(self) -> bool:
        """Return whether requests are taken: replicas that are gone come back, or others do."""
        return not self._closed

    @property
    def pressure(self) -> int:
        return max((report.pressure for report in self.members.alive), default=0)

    @property
    def limits(self) -> EngineLimits:
        """Return what every replica takes. Asked when there has been one."""
        reports = self.members.telling
        return replace(
            reports[0].limits,
            max_model_len=min(report.limits.max_model_len for report in reports),
            max_num_seqs=sum(report.limits.max_num_seqs for report in reports),
        )

    @property
    def stats(self) -> EngineStats:
        return self.members.stats

    @property
    def step_age_s(self) -> float:
        return max((report.step_age_s for report in self.members.alive), default=0.0)

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    @property
    def capacity(self) -> int:
        return sum(report.capacity for report in self.members.alive)

    @property
    def max_share(self) -> int:
        return self._slots.max_share(self.capacity)

    def check_room(self, requests: int, tenant: bytes) -> None:
        self._slots.check(requests, tenant, self.capacity)

    async def memory_map(self) -> MemoryMap:
        """Return what the memory of the first replica holds. Raises EngineDeadError."""
        try:
            first = self.members.alive[0].name
            async with asyncio.timeout(self._silence_s):
                found: MemoryMap = await self._replicas.ask("memory_map", Route(target=first))
                return found
        except Exception as error:
            raise EngineDeadError from error

    def submit(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, **options: Any
    ) -> TokenStream:
        """Hand over one request. options: other fields of its Submission."""
        (stream,) = self.submit_choices(Submission(prompt_ids, (params,), **options))
        return stream

    def submit_choices(
        self, asked: Submission, read_with: TokenStream | None = None
    ) -> list[TokenStream]:
        """Hand over one request for each of ``asked.params``, as EngineClient does."""
        if not self.alive:
            raise EngineDeadError
        self.limits.check_length(asked.prompt_ids, asked.params)
        if not asked.beyond_queue:
            self.check_room(len(asked.params), asked.salt.tenant)
        sendable = asked.constraint is None or isinstance(asked.constraint, SentForm)
        assert sendable, "it cannot be sent"
        wake = asyncio.Event() if read_with is None else read_with.wake
        call = _Call(asked, [], set(range(len(asked.params))))
        for number, params in enumerate(asked.params):
            self._last_id += 1
            request = Request(
                self._last_id, asked.prompt_ids, params, asked.priority, asked.salt, name=asked.name
            )
            call.streams.append(TokenStream(request, self._abort, self._max_backlog, wake))
            self._calls[self._last_id] = call, number
        self._slots.take(len(call.streams), asked.salt.tenant)
        call.task = asyncio.create_task(self._answer(call))
        return call.streams

    async def _answer(self, call: _Call) -> None:
        """Have the prompt answered, by another replica where one is lost before it has begun."""
        refused: set[str] = set()
        message = REPLICA_LOST
        # A long prompt takes many milliseconds: meanwhile others' tokens are delivered.
        text = await asyncio.to_thread(routed_text, call.submission, self.limits)
        for attempt in range(MAX_ATTEMPTS):
            without = frozenset(refused | self.members.silent)
            if attempt and without.issuperset(self.members.names):
                break
            self.retries += attempt > 0
            route = Route(text, without)
            try:
                await self._follow(call, route)
                return
            except ReplicaError as error:
                message = str(error)
                if message == REPLICA_LOST and route.replica is not None:
                    self.members.lose(route.replica)
            if call.has_begun:
                break
            if route.replica is not None:
                refused.add(route.replica)
        self._fail(call, message)

    async def _follow(self, call: _Call, route: Route) -> None:
        """Deliver what a replica says, until all answers have ended. Raises ReplicaError."""
        missing = set(call.open)
        async with aclosing(self._replicas.generate(route, call.submission)) as batches:
            while missing & call.open:
                try:
                    async with asyncio.timeout(self._silence_s):
                        batch = await anext(batches)
                except Exception as error:
                    log.info("a replica is lost: %s", type(error).__name__)
                    raise ReplicaError(REPLICA_LOST) from error
                if isinstance(batch, Refusal):
                    full = batch is Refusal.FULL
                    raise ReplicaError(REPLICAS_FULL if full else REPLICA_LOST)
                call.has_begun |= bool(batch)
                missing -= self._deliver(call, batch)

    def _deliver(self, call: _Call, batch: Sequence[Numbered]) -> set[int]:
        """Deliver events, and return the numbers of the answers that have ended."""
        ended = set()
        for number, event in batch:
            stream = call.streams[number]
            if number in call.open:
                stream.deliver(event._replace(request_id=stream.request.request_id))
            if event.finish is not None:
                ended.add(number)
                self._free(call, number)
        return ended

    def _fail(self, call: _Call, message: str) -> None:
        """End what has not ended with an error."""
        for number in sorted(call.open):
            event = TokenEvent(0, None, FinishReason.ERROR, message=message)
            self._deliver(call, [(number, event)])
        if not self._closed:
            log.warning("the request %s has failed: %s", call.submission.name, message)

    def _free(self, call: _Call, number: int) -> None:
        """Note that nobody reads an answer any more. Idempotent."""
        if number in call.open:
            call.open.remove(number)
            del self._calls[call.streams[number].request.request_id]
            self._slots.free(call.submission.salt.tenant)

    def _abort(self, request_id: int) -> None:
        """Note that an answer's reader has left; where all have, the replica is told."""
        call, number = self._calls[request_id]
        self._free(call, number)
        if not call.open:
            call.task.cancel()


def routed_text(submission: Submission, limits: EngineLimits) -> str:
    """Return a character for each full block of a prompt: what a replica shares of it is known by
    them. They are made of hashes, which tell tenants apart."""
    if limits.shared_block_tokens is None:
        return ""
    hashes = BlockHashes(b"", submission.salt, limits.shared_block_tokens)
    hashes.extend(submission.prompt_ids, 0)
    return "".join(
        chr(BEHIND_SURROGATES + (int.from_bytes(digest[:3]) >> 4)) for digest in hashes.digests
    )
