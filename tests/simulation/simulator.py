"""One seed, one life of an engine: production scheduler, cache and loop on a simulated machine.

Nothing here depends on threads, on the wall clock or on chance outside the seed. After every step
the cache's books are checked; every token is compared with a reference that has no cache.
"""

import asyncio
from collections import Counter, deque
from heapq import heappop, heappush
from random import Random

from engine.client import TokenStream
from engine.machine import PressureLevel
from engine.messages import Abort, SetKVLimit, SetMemoryPressure
from engine.step.health_check import HEALTH_CHECK_ID, ModelFailedError
from engine.step.loop import STALLED_POLL_S
from engine.step.memory_release import IDLE_POLL_S
from engine.types import EngineFailedError, FinishReason, Request, SamplingParams, TokenEvent
from kvcache.backends.backend import BackendFailedError, Releases
from tests.simulation.clients import Client
from tests.simulation.disk import Disk
from tests.simulation.faults import SeedFailedError, SimulationError, TraceLine
from tests.simulation.machine import Machine
from tests.simulation.recall import Recall, Rules
from tests.simulation.switches import Settings, draw_settings, make_world
from tests.simulation.traffic import Traffic
from tests.simulation.world import VOCAB, World

TRACE_LINES = 24
DRAIN_ROUNDS = 12
IDLE_ROUNDS = 3
DISK_PATIENCE = 8000  # steps of STALLED_POLL_S: how long memory of a transfer is waited for
NO_MEMORY = "the system has no memory for it"
FAILED_STEP = "a step of the engine failed"
BAD_ROW = "the model's output was not finite"
BROKEN = "the rules for the answer's form could not be followed"


class Simulation:
    """An engine, its machine and its clients."""

    def __init__(
        self,
        seed: int,
        settings: Settings | None = None,
        *,
        world: World | None = None,
        trace_lines: int | None = TRACE_LINES,
        disk: Disk | None = None,
    ) -> None:
        """settings: else the seed's own. world: in place of theirs. trace_lines: of the newest
        steps; None keeps all. disk: that of an earlier life."""
        self.settings = settings or draw_settings(seed)
        self.world = world or make_world(seed, self.settings)
        self.trace: deque[TraceLine] = deque(maxlen=trace_lines)
        self.counts: Counter[str] = Counter(seeds=1)
        self._seed = seed
        if disk is None and self.world.disk_fault_rate is not None:
            disk = Disk(seed, self.world)
        self._disk = disk
        self._limits = self.world.limits
        self._rng = Random(f"{seed} clients")
        self._traffic = Traffic(self.world, Random(f"{seed} traffic"))
        self._clients: dict[int, Client] = {}
        self._recalls = {HEALTH_CHECK_ID: Recall((0,), 0, VOCAB)}
        self._live: dict[int, Client] = {}
        """Clients whose end the engine has not emitted."""
        self._reading: dict[int, Client] = {}
        self._machine = Machine(seed, self.world, self._hear, self._recalls.__getitem__, disk)
        self._weather = Random(f"{seed} pressure")
        self._pressure = PressureLevel.NORMAL
        """The memory pressure that the engine knows."""
        self._company = Random(f"{seed} other models")
        self._was_limited = False
        self._agenda: list[tuple[float, int, int | None]] = []
        """(time, number, the request to abort): None is an arrival."""
        self._agenda += [(time, number, None) for number, time in enumerate(self.world.arrivals)]
        self._told: set[int] = set()
        """Requests whose abort the next step must see."""
        self._said: list[TokenEvent] = []
        """By the newest step."""
        self._undelivered: list[TokenEvent] = []
        self._round = 0
        self._quiet = 0
        """Steps since the last event."""
        if self.world.pressure > PressureLevel.NORMAL:
            self._press(self.world.pressure)

    # --- a life ---------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Run until all requests have ended and all memory has gone back; return counts of events.
        Raises SeedFailedError."""
        try:
            self._run()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            trace = "\n".join(str(line) for line in self.trace)
            raise SeedFailedError(self._seed, self.settings, reason, trace) from error
        self._count()
        if self._disk is not None and self._disk.restart():
            # The same requests find what the first life has left.
            again = Simulation(self._seed, self.settings, world=self.world, disk=self._disk).run()
            self.counts += again - Counter(("seeds",))
        return self.counts

    def _run(self) -> None:
        faults = self._machine.memory.faults
        try:
            while self._agenda or self._live:
                self._turn()
            self._drain()
            self._check_end()
        except EngineFailedError:
            if not self._machine.faults.ends_engine:
                raise
            self.counts["engines ended by their device"] += 1
        except BackendFailedError:
            if not faults.stuck:
                raise
            self.counts["engines ended by their memory"] += 1
        except ModelFailedError:
            if not self.world.model_is_broken:
                raise
            self.counts["engines ended by their model"] += 1

    def _turn(self) -> None:
        """Do what is due: a step, and the reading of its events."""
        self._round += 1
        self._change_pressure()
        self._change_limit()
        self._do_due()
        self._deliver()
        worked = self._step()
        if not self._happens(self.world.late_delivery_rate):
            self._deliver()
        for request_id, client in list(self._reading.items()):
            client.read_some(self._round)
            if client.finish is not None and (client.left or client.reader_end is not None):
                del self._reading[request_id]
        if not worked:
            self._pass_time()

    def _change_pressure(self) -> None:
        if self._weather.random() < self.world.pressure_rate:
            self._press(self._weather.choice(list(PressureLevel)))

    def _change_limit(self) -> None:
        """Let other models take memory of K and V, or give it back."""
        self._was_limited = self._company.random() < self.world.limit_rate
        if self._was_limited:
            self._limit(self._company.choice((0.0, 0.5, 1.0)))

    def _limit(self, part: float) -> None:
        budget_bytes = self.world.budget_bytes
        self._machine.loop.mailbox.put(SetKVLimit(int(part * budget_bytes), self._check_limit))
        self.counts["limits of K and V"] += 1

    def _check_limit(self, allowed_bytes: int) -> None:
        stats = self._machine.kv.stats()
        if stats.capacity_bytes > allowed_bytes + stats.quarantined_bytes:
            raise SimulationError(f"{allowed_bytes} bytes were promised to other models")

    def _press(self, level: PressureLevel) -> None:
        self._pressure = level
        self.counts["times short of memory"] += level > PressureLevel.NORMAL
        self._machine.loop.mailbox.put(SetMemoryPressure(level))

    def _pass_time(self) -> None:
        """Wait for memory or for a request, as nothing was run."""
        clock = self._machine.clock
        if self._live:
            clock.now += STALLED_POLL_S
            return
        for _ in range(IDLE_ROUNDS):
            clock.now += IDLE_POLL_S
            self._step()
        if self._agenda:
            clock.now = max(clock.now, self._agenda[0][0])

    def _step(self) -> bool:
        """Run one step of the engine, and check it."""
        machine = self._machine
        refused = machine.memory.faults.refused
        told, self._told = self._told, set()
        first = min(self._live.values(), key=lambda c: c.order, default=None)
        preempted, running = self._preemptions(first), machine.scheduler.num_running
        evicted, begun = machine.kv.stats().evicted_blocks, machine.begun
        idle_since = machine.loop._memory.idle_since
        is_tried = machine.loop._health_check.is_running
        machine.runner.newest = None
        machine.runner.failed, machine.runner.failed_late = machine.runner.failed_late, None
        self._said = []
        machine.runner.tick()
        worked = machine.loop.run_once()
        machine.kv.check_invariants()
        machine.runner.check_states()
        self._check_aborted(told)
        self._check_failed()
        if self._holds_back and machine.scheduler.num_running > max(1, running):
            raise SimulationError("somebody was let in although the system is short of memory")
        if machine.scheduler.holds_back != self._holds_back:
            raise SimulationError(f"let in one by one: {machine.scheduler.holds_back}")
        # Under a limit, a block that stays mapped is taken in place of one that is forgotten.
        limited = self.world.limit_rate > 0 and not machine.memory.maps_while_running
        limited = limited or self._was_limited
        if machine.begun == begun and not machine.unfriendly and not limited:
            self._check_forgotten(machine.kv.stats().evicted_blocks - evicted, idle_since)
        if self._preemptions(first) > preempted and not is_tried:
            raise SimulationError("the first in order was preempted")
        self._check_progress()
        self._note(machine.memory.faults.refused - refused)
        return worked

    def _drain(self) -> None:
        """Check that late operations end, prefixes are forgotten, and memory goes back."""
        self._deliver()
        for memory in self._machine.memories:
            memory.slowness = 0.0
        if (tier := self._machine.kv._tier) is not None:
            tier.write_ends_now()
            for _ in range(DRAIN_ROUNDS):
                self._step()
            self._machine.workers.holds = lambda: False
            tier._due.clear()
        for _ in range(DRAIN_ROUNDS):
            self._step()
            if self._machine.runner.newest is not None and not self._tries_model:
                raise SimulationError("a step is run for nobody")
            self._machine.clock.now += self.world.idle_release_s + self.world.prefix_keep_s

    @property
    def _tries_model(self) -> bool:
        """Return whether the newest step was the engine's own."""
        plan = self._machine.runner.newest
        return plan is not None and all(e.seq_id == HEALTH_CHECK_ID for e in plan.entries)

    # --- clients --------------------------------------------------------------------------------

    def _do_due(self) -> None:
        while self._agenda and self._agenda[0][0] <= self._machine.clock.now:
            _, _, aborted = heappop(self._agenda)
            if aborted is None:
                past = [(c.request, c.tokens) for c in list(self._clients.values())[-8:]]
                self._submit(self._traffic.draw(past))
            elif not self._clients[aborted].left:
                self._clients[aborted].leave()

    def _submit(self, request: Request) -> None:
        for number, params in zip(request.answer_ids, request.params, strict=True):
            self._add_client(request, number, params)
        self._machine.loop.mailbox.put(request)

    def _add_client(self, request: Request, number: int, params: SamplingParams) -> None:
        world, most = self.world, params.max_tokens
        aborted = self._happens(world.abort_rate)
        stops = not aborted and self._happens(world.stop_string_rate)
        slow = self._happens(world.slow_reader_rate)
        client = Client(
            request,
            number,
            Recall(request.prompt_ids, params.seed, VOCAB, Rules(request, params, VOCAB)),
            TokenStream(request, number, self._abort, world.max_backlog, asyncio.Event()),
            self._limits.max_model_len,
            world.max_backlog,
            pace=self._rng.choice((0, 5, 20)) if slow else 1,
            leaves_after=self._rng.randint(1, max(1, most)) if stops else None,
        )
        self._clients[number] = self._live[number] = self._reading[number] = client
        self._recalls[number] = client.recall
        self.counts["requests"] += 1
        self.counts["forks"] += number != request.request_id
        if aborted:
            rng = self._rng
            delay = rng.choice((0.0, rng.expovariate(100), rng.expovariate(5)))
            time = self._machine.clock.now + delay
            heappush(self._agenda, (time, len(world.arrivals) + number, number))

    def _happens(self, rate: float) -> bool:
        return self._rng.random() < rate

    def _abort(self, request_id: int) -> None:
        """Tell the engine that a stream was closed before its end."""
        self._clients[request_id].aborted = True
        if request_id in self._live:
            self._told.add(request_id)
        self._machine.loop.mailbox.put(Abort(request_id))

    def _hear(self, events: list[TokenEvent]) -> None:
        """Check and deliver the engine's events."""
        for event in events:
            client = self._clients[event.request_id]
            client.take(event)
            self._check_report(event, client)
            self.counts["tokens"] += event.token_id is not None
            self.counts["prompts scored"] += event.prompt_logprobs is not None
            self.counts["vectors"] += event.embedding is not None
            if event.finish is not None:
                self._check_error(event)
                del self._live[event.request_id]
        self._said += events
        self._undelivered += events

    def _deliver(self) -> None:
        events, self._undelivered = self._undelivered, []
        for event in events:
            self._clients[event.request_id].deliver(event)

    # --- what must be true ----------------------------------------------------------------------

    def _preemptions(self, client: Client | None) -> int:
        sequences = self._machine.scheduler._by_id
        sequence = sequences.get(client.answer_id) if client else None
        return sequence.preemptions if sequence else 0

    def _check_aborted(self, told: set[int]) -> None:
        late = told & self._live.keys()
        if late:
            raise SimulationError(f"requests {sorted(late)} outlive the step after their abort")

    @property
    def _holds_back(self) -> bool:
        """Return whether no request may join those that run."""
        keeps = self._machine.memory.releases not in (Releases.BLOCKS, Releases.HEAPS)
        return self._pressure >= (PressureLevel.CRITICAL if keeps else PressureLevel.WARNING)

    def _check_forgotten(self, evicted: int, idle_since: float | None) -> None:
        """Check that, where no memory goes back, a prefix is forgotten only after a pause, or for a
        block that is mapped at once. evicted: blocks, in a step that mapped none."""
        machine = self._machine
        kept = self.world.prefix_keep_s
        was_idle = idle_since is not None and machine.clock.now - idle_since >= kept
        if evicted and not was_idle and machine.memory.releases.keeps_heaps:
            raise SimulationError("prefixes were forgotten, and no memory goes back for it")

    def _check_failed(self) -> None:
        """Check that a failed step ends its requests, and a row that is not finite its own."""
        runner = self._machine.runner
        spared = runner.bad_rows & self._live.keys()
        if runner.failed is not None:
            spared |= {entry.seq_id for entry in runner.failed.entries} & self._live.keys()
            if self._machine.faults.ends_engine:
                raise SimulationError("the second failed step in a minute did not end the engine")
        if spared:
            raise SimulationError(f"requests {sorted(spared)} outlive a fault of theirs")

    def _check_error(self, event: TokenEvent) -> None:
        """Check that an error has a reason."""
        runner, number = self._machine.runner, event.request_id
        if event.finish is not FinishReason.ERROR:
            return
        if event.message == FAILED_STEP:
            plans = [plan for plan in (runner.failed, runner.failed_late) if plan is not None]
            is_right = any(entry.seq_id == number for plan in plans for entry in plan.entries)
        elif event.message == BROKEN:
            constraint = self._clients[number].constraint
            is_right = constraint is not None and (
                constraint.fails_at == self._clients[number].answered
            )
        elif event.message == BAD_ROW:
            is_right = number in runner.bad_rows
        else:
            excused = self._machine.unfriendly or self._machine.disk_hangs
            is_right = event.message == NO_MEMORY and excused
        if not is_right:
            raise SimulationError(f"request {number} fails without a fault: {event.message}")

    def _check_report(self, event: TokenEvent, client: Client) -> None:
        """Check that a request is told of as many shared tokens as were not computed for it."""
        number, report = event.request_id, event.prefix
        computed_from = self._machine.runner.computed_from.get(number)
        is_due = event.finish is not None or client.answered == 1
        if report is None and is_due and computed_from is not None:
            raise SimulationError(f"request {number} is told nothing of its prefix")
        if report is not None and computed_from not in (None, report.cached_tokens):
            raise SimulationError(f"{report}, and token {computed_from} was computed first")

    def _check_progress(self) -> None:
        """Check that the engine emits something from time to time while a request waits."""
        self._quiet = 0 if self._said or not self._live else self._quiet + 1
        self.counts["longest quiet"] = max(self.counts["longest quiet"], self._quiet)
        chunks = 1 + self._limits.max_model_len // self.world.min_budget_tokens
        patience = 200 if self._disk is None else DISK_PATIENCE
        if self._quiet > patience + 60 * chunks + 4 * self._machine.memory.faults.refused:
            raise SimulationError(f"{self._quiet} steps and no event")

    def _check_end(self) -> None:
        """Check that each request had one end, and that nothing of it remains."""
        for client in self._clients.values():
            client.check_end()
        self._machine.check_returned()
        is_calm = not self._machine.unfriendly and not self._machine.faults.failed_at
        if self.world.model_is_broken and self._machine.runner.bad_rows and is_calm:
            raise SimulationError("a model that computes nothing served to the end")
        self._check_waste()
        counters, bad_rows = self._machine.scheduler.counters, len(self._machine.runner.bad_rows)
        tokens = self.counts["tokens"] + self._machine.runner.trials
        if counters.generated_tokens != tokens or counters.failed_rows != bad_rows:
            raise SimulationError(f"{counters}: there were {tokens} tokens, {bad_rows} bad rows")
        if counters.accepted_tokens != self._machine.runner.kept:
            raise SimulationError(f"{counters}: {self._machine.runner.kept} drafts were kept")

    def _check_waste(self) -> None:
        """Check that at most one row was wasted for each request that ended, and none for an end
        that could be seen coming."""
        wasted = self._machine.runner.wasted
        known = [n for n in wasted if n in self._clients]
        ends = [n for n in known if self._clients[n].finish is FinishReason.LENGTH]
        if len(set(wasted)) < len(wasted) or ends:
            raise SimulationError(f"rows were wasted for {sorted(wasted)}")
        if self._machine.scheduler.counters.wasted_rows != len(wasted):
            raise SimulationError(f"{len(wasted)} rows were wasted")

    # --- what happened --------------------------------------------------------------------------

    def _note(self, refused: int) -> None:
        machine = self._machine
        plan = machine.runner.newest
        self.counts["steps"] += plan is not None
        self.counts["stalls"] += plan is None and bool(self._live)
        ends = [event for event in self._said if event.finish is not None]
        self.trace.append(TraceLine(machine.clock.now, len(self._live), plan, refused, ends))
        for event in ends:
            assert event.finish is not None
            self.counts[f"ends: {event.message or event.finish.value}"] += 1
            if event.prefix is not None:
                miss = event.prefix.miss
                self.counts["prefix hits"] += event.prefix.cached_tokens > 0
                self.counts[f"prefix misses: {miss.value if miss else 'none'}"] += 1

    def _count(self) -> None:
        machine, counters = self._machine, self._machine.scheduler.counters
        cut = [c for c in self._clients.values() if "the reader is too slow" in c.messages]
        self.counts.update(
            {
                "slow readers cut": len(cut),
                "rows computed": machine.runner.computed,
                "cached tokens": counters.cached_prompt_tokens,
                "preemptions": counters.preemptions,
                "drafts kept": counters.accepted_tokens,
                "drafts rejected": counters.drafted_tokens - counters.accepted_tokens,
                "blocks copied": machine.memory.copies,
                "mapping waits": machine.kv.mapping_waits,
                "models tried": machine.runner.trials,
                "failed steps": len(machine.faults.failed_at),
                "refusals": machine.memory.faults.refused,
                "rows wasted": counters.wasted_rows,
                "sequences of dropped steps": machine.runner.spared,
                "states set back": machine.runner.set_back,
                "steps that waited for tokens": machine.runner.waited,
                "bytes read from disk": machine.kv.disk_stats().read_bytes,
                "bytes written to disk": machine.kv.disk_stats().written_bytes,
                "disk failures": machine.kv.disk_stats().failures,
            }
        )
