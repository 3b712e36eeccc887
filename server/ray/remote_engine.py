"""Presents the engines of all replicas of a cluster to the HTTP server as one ServingEngine.

Each prompt goes to one replica that answers and is not full. If a replica is lost, its prompts
without a generated token move to another replica, and its other answers end with an error."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from engine.client import MAX_BACKLOG, Slots, TokenStream
from engine.memory_map import MemoryMap
from engine.types import (
    BlockHashes,
    EngineDeadError,
    EngineLimits,
    EngineStats,
    FinishReason,
    Request,
    TokenEvent,
)
from server.protocol.wire_errors import REPLICA_LOST
from server.ray.membership import Membership
from server.ray.replica_calls import (
    NumberedEvent,
    RayReplicas,
    Route,
    UncompiledConstraint,
)

# A replica that sends nothing for this long is lost: during an answer it sends every second.
SILENCE_S = 5.0
REPORT_PERIOD_S = 1.0
MAX_LOSSES = 3
FULL_PAUSE_S = 0.05
# The first code point after the surrogates. UTF-8 can encode its sum with any 20-bit number.
BEHIND_SURROGATES = 0xE000

log = logging.getLogger(__name__)


class ReplicaError(Exception):
    """Raised if a replica is lost or full. The text is REPLICA_LOST or REPLICAS_FULL."""


@dataclass(slots=True, eq=False)
class _Call:
    """A prompt whose answers are being generated, and the streams of these answers."""

    request: Request
    streams: list[TokenStream]
    unread: set[int]
    """Indices into ``streams`` of the running answers that still have a reader."""
    has_begun: bool = False
    """True after the first event of an answer was delivered."""
    task: "asyncio.Task[None]" = field(init=False)


class RemoteEngine:
    """A ServingEngine whose answers come from replicas. All methods run on the event loop."""

    def __init__(
        self,
        replicas: RayReplicas,
        *,
        max_share_ratio: float = 1.0,
        silence_s: float = SILENCE_S,
        report_period_s: float = REPORT_PERIOD_S,
    ) -> None:
        """An API key gets at most ``max_share_ratio`` of all slots (places for requests). A replica
        that sends nothing for ``silence_s`` seconds is lost."""
        self._replicas = replicas
        self._silence_s = silence_s
        self._report_period_s = report_period_s
        self.members = Membership(silence_s + report_period_s, time.monotonic)
        self.slots = Slots(max_share_ratio, lambda: self.capacity)
        self._calls: dict[int, tuple[_Call, int]] = {}
        """``{answer id: (call, index of the answer in the call)}``."""
        self._last_id = 0
        self._closed = False
        self._reporting: asyncio.Task[None] | None = None

    def attach(self) -> None:
        """Start a task that gets a report from each replica regularly."""
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._keep_asking())

    async def ready(self) -> None:
        """Wait until a replica has sent a report."""
        self.attach()
        while not self.members.alive:  # noqa: ASYNC110
            await asyncio.sleep(self._report_period_s / 10)

    def end_all(self, message: str) -> None:
        self._closed = True
        for call in {id(call): call for call, _ in self._calls.values()}.values():
            self._fail(call, message)
            call.task.cancel()
        if self._reporting is not None:
            self._reporting.cancel()

    async def _keep_asking(self) -> None:
        while True:
            await self.ask_all()
            await asyncio.sleep(self._report_period_s)

    async def ask_all(self) -> None:
        """Get the names of all replicas from the router, and a report from each replica."""
        routes = [Route(target=name) for name in self.members.names] or [Route()]
        await asyncio.gather(*map(self._ask, routes))
        if names := routes[-1].replicas:
            self.members.set_names(names)
            heard = {report.name for report in self.members.reports}
            new = [Route(target=name) for name in self.members.names if name not in heard]
            await asyncio.gather(*map(self._ask, new))

    async def _ask(self, route: Route) -> None:
        try:
            async with asyncio.timeout(self._silence_s):
                self.members.hear(await self._replicas.ask("report", route))
        except Exception as error:
            log.info("a replica does not say how it is: %s", type(error).__name__)

    @property
    def alive(self) -> bool:
        """True until ``end_all`` is called, even if replicas are lost: Ray replaces them."""
        return not self._closed

    @property
    def pressure(self) -> int:
        return max((report.pressure for report in self.members.alive), default=0)

    @property
    def limits(self) -> EngineLimits:
        """Limits of requests for all replicas together. Must not be read before ``ready()``."""
        reports = self.members.limiting_reports
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

    async def memory_map(self) -> MemoryMap:
        """Return the memory map of one replica that answers. Raises EngineDeadError."""
        try:
            first = self.members.alive[0].name
            async with asyncio.timeout(self._silence_s):
                memory: MemoryMap = await self._replicas.ask("memory_map", Route(target=first))
                return memory
        except Exception as error:
            raise EngineDeadError from error

    def submit(self, request: Request, read_with: TokenStream | None = None) -> list[TokenStream]:
        if not self.alive:
            raise EngineDeadError
        tenant, answers = request.salt.tenant, len(request.params)
        self.limits.check_length(request)
        if not request.beyond_queue:
            self.slots.check(answers, tenant)
        form = request.constraint
        sendable = form is None or isinstance(form, UncompiledConstraint)
        assert sendable, "a compiled constraint cannot be sent"
        wake = asyncio.Event() if read_with is None else read_with.wake
        request = replace(request, request_id=self._last_id + 1)
        call = _Call(request, [], set(range(answers)))
        for index, answer_id in enumerate(request.answer_ids):
            call.streams.append(TokenStream(request, answer_id, self._abort, MAX_BACKLOG, wake))
            self._calls[answer_id] = call, index
        self._last_id += answers
        self.slots.take(answers, tenant)
        call.task = asyncio.create_task(self._answer(call))
        return call.streams

    async def _answer(self, call: _Call) -> None:
        """Deliver a prompt's answers. If a replica is lost or full before the first event, use
        another one. If all are full, wait up to ``silence_s`` until a replica has a free slot."""
        tried, losses, message = set[str](), 0, ""
        deadline = time.monotonic() + self._silence_s
        # Hash in a thread: a long prompt takes milliseconds, which would delay other answers.
        text = await asyncio.to_thread(routed_text, call.request, self.limits)
        while losses < MAX_LOSSES and not call.has_begun:
            without = frozenset(tried | self.members.silent)
            if message and without.issuperset(self.members.names):
                if message == REPLICA_LOST or time.monotonic() > deadline:
                    break
                # ``slots.check`` has found a free slot for this prompt, so try all replicas again.
                tried.clear()
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            self.members.retries += bool(message)
            route = Route(text, without)
            try:
                await self._follow(call, route)
                return
            except ReplicaError as error:
                message = str(error)
            losses += message == REPLICA_LOST
            if route.replica is not None:
                tried.add(route.replica)
                if message == REPLICA_LOST:
                    self.members.lose(route.replica)
        self._fail(call, message)

    async def _follow(self, call: _Call, route: Route) -> None:
        """Deliver a replica's events until no running answer has a reader. Raises ReplicaError."""
        running = set(call.unread)
        async with aclosing(self._replicas.generate(route, call.request)) as batches:
            while running & call.unread:
                try:
                    async with asyncio.timeout(self._silence_s):
                        batch = await anext(batches)
                except Exception as error:
                    log.info("a replica is lost: %s", type(error).__name__)
                    raise ReplicaError(REPLICA_LOST) from error
                if isinstance(batch, str):
                    raise ReplicaError(batch)
                call.has_begun |= bool(batch)
                self._deliver(call, batch)
                running -= {index for index, event in batch if event.finish is not None}

    def _deliver(self, call: _Call, batch: Sequence[NumberedEvent]) -> None:
        for index, event in batch:
            stream = call.streams[index]
            if index in call.unread:
                stream.deliver(event._replace(request_id=stream.answer_id))
            if event.finish is not None:
                self._free(call, index)

    def _fail(self, call: _Call, message: str) -> None:
        """End the call's running answers with an error event."""
        event = TokenEvent(0, None, FinishReason.ERROR, message=message)
        self._deliver(call, [(index, event) for index in sorted(call.unread)])
        if not self._closed:
            log.warning("the request %s has failed: %s", call.request.name, message)

    def _free(self, call: _Call, index: int) -> None:
        """Free the slot of an answer that ended or lost its reader. A second call does nothing."""
        if index in call.unread:
            call.unread.remove(index)
            del self._calls[call.streams[index].answer_id]
            self.slots.free(call.request.salt.tenant)

    def _abort(self, request_id: int) -> None:
        """Free an answer's slot after its reader left. If no reader is left, cancel the call."""
        call, index = self._calls[request_id]
        self._free(call, index)
        if not call.unread:
            call.task.cancel()


def routed_text(request: Request, limits: EngineLimits) -> str:
    """Return a text with a character for each full block of a prompt, made from the block's hash.
    The router compares prompts by these texts, which differ between tenants (API keys)."""
    if limits.shared_block_tokens is None:
        return ""
    hashes = BlockHashes(b"", request.salt, limits.shared_block_tokens)
    hashes.extend(request.prompt_ids, 0)
    return "".join(
        chr(BEHIND_SURROGATES + (int.from_bytes(digest[:3]) >> 4)) for digest in hashes.digests
    )
