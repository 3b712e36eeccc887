"""The engine's loop, on the only thread that uses MLX: receives messages, runs steps, emits events.
Around its steps, the loop checks the model's health, releases memory, and makes statistics."""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

from engine.config import EngineConfig
from engine.figures import Drafting, MlxMemory, StepMeter
from engine.journal import Journal
from engine.memory_map import MemoryMap, report_first
from engine.messages import Abort, CheckModel, GetMemoryMap, Message, SetKVLimit, SetMemoryPressure
from engine.step.constraints import sampling_state
from engine.step.health_check import HEALTH_CHECK_ID, ModelHealthCheck
from engine.step.memory_release import MemoryRelease
from engine.step.pipeline import CancelledStep, CompletedStep, RetiredStep, StepPipeline
from engine.step.plan import NO_STEP, PendingState, StepPlan, StepRunner
from engine.step.row_costs import RowCosts
from engine.step.scheduler import Scheduler
from engine.types import (
    EngineStats,
    EngineStuckError,
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
)
from kvcache.backends.backend import BackendFailedError
from kvcache.manager import KVCacheManager
from kvcache.tier.store import RecordStore

log = logging.getLogger(__name__)

# The loop waits this long for a message while sequences wait for memory that is being freed.
STALLED_POLL_S = 0.001
# The most time to write the ends of conversations to disk when the engine ends.
DISK_END_S = 3.0
# Statistics are updated after this interval, and in each step that begins a request.
STATS_INTERVAL_S = 0.02
WARM_UP_TOKENS = 4
STEP_FAILED = "a step of the engine failed"
REFUSED = (
    "the engine has failed before while this request ran alone: it is refused (digest {}) until "
    "`quire doctor` has run"
)
Emit = Callable[[list[TokenEvent]], None]


class EngineLoop:
    """Runs the engine's steps until a Stop message."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        runner: StepRunner,
        config: EngineConfig,
        *,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        mlx_memory: Callable[[], MlxMemory] = MlxMemory,
        journal: Journal | None = None,
        costs: RowCosts | None = None,
    ) -> None:
        """``emit`` is called on the engine's thread, once in each step that has events. ``costs``
        are written down at the engine's end."""
        self.mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.stats = EngineStats()
        self.limits = scheduler.limits
        self._scheduler = scheduler
        self._kv = kv
        self._runner = runner
        self._checks_every_step = config.check_every_step
        self._emit = emit
        self._clock = clock
        self._mlx_memory = mlx_memory
        self._journal = Journal() if journal is None else journal
        self._costs = RowCosts() if costs is None else costs
        self._session = ExitStack()
        self._session.enter_context(self._journal.session())
        self._pipeline = StepPipeline(runner, kv, clock, max_depth=2 if config.overlap else 1)
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._stopping = False
        self._memory = MemoryRelease(scheduler, kv, runner, config)
        self._stats_at = float("-inf")
        pooling = self.limits.embedding_size is not None
        self._health_check = ModelHealthCheck(scheduler.add, pooling=pooling)
        self.busy_since: float | None = None
        """When work began or a step last completed; None without work. Any thread may read this."""

    # --- a step ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step, then retire (read) the previous step. Return True if any step was
        launched or retired."""
        events = self._receive()
        plan = self._next_plan()
        retired = self._pipeline.advance(plan)
        events += self._commit(retired)
        state = self._begin_state(plan)
        self._publish([*plan.refused, *events])
        self._pipeline.flush(state)
        self._kv.step_completed(self._runner.completed_epoch)
        return bool(plan.entries or retired)

    def _receive(self) -> list[TokenEvent]:
        """Handle all messages in the mailbox. Return events of requests that ended by them."""
        events: list[TokenEvent] = []
        with suppress(queue.Empty):
            while True:
                events += self._handle(self.mailbox.get_nowait())
        return events

    def _handle(self, message: Message) -> list[TokenEvent]:
        if isinstance(message, Request):
            return self._add(message)
        if isinstance(message, Abort):
            return self._scheduler.abort(message.request_id)
        if isinstance(message, SetMemoryPressure):
            self._memory.set_pressure(message.level)
        elif isinstance(message, SetKVLimit):
            message.answer(self._kv.set_limit(message.limit_bytes))
        elif isinstance(message, CheckModel):
            self._health_check.start()
        elif isinstance(message, GetMemoryMap):
            message.answer(self._memory_map())
        else:
            self._stopping = True
        return []

    def _add(self, request: Request) -> list[TokenEvent]:
        """Queue a request, or return its answers' errors if it has ended the engine before."""
        trust = self._journal.trust(request.prompt_ids)
        if trust == "refused":
            why = REFUSED.format(self._journal.digest(request.prompt_ids))
            error = TokenEvent(0, None, FinishReason.ERROR, message=why)
            return [error._replace(request_id=answer_id) for answer_id in request.answer_ids]
        self._scheduler.add(request, alone=trust == "alone")
        return []

    def _next_plan(self) -> StepPlan:
        if not self._pipeline.may_launch():
            return NO_STEP
        plan = self._scheduler.schedule(overlapped=self._pipeline.depth > 0)
        if plan.begun:
            # Update the statistics now, so that they are current if this step hangs.
            self.stats = self._snapshot()
        return plan

    def _begin_state(self, plan: StepPlan) -> PendingState | None:
        """Start to make the step's SamplingState on another thread. Call this when all earlier
        tokens are known. Return None if the plan needs no state, or the plan's step has failed."""
        if not plan.needs_state or not self._pipeline.depth:
            return None
        rows, vocab_size = self._scheduler.sampling_rows(plan), self.limits.vocab_size
        return self._mask_thread.submit(sampling_state, rows, vocab_size)

    def _commit(self, retired: list[RetiredStep]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for step in retired:
            if isinstance(step, CompletedStep):
                self._scheduler.observe(step)
                self._journal.worked(step.seconds)
                events += self._scheduler.commit(step.plan, step.outcomes)
                self._health_check.observe(step.outcomes)
            elif isinstance(step, CancelledStep):
                self._scheduler.cancel(step.plan)
            else:
                events += self._scheduler.fail(step.plan, STEP_FAILED)
        return events

    def _publish(self, events: list[TokenEvent]) -> None:
        others = self._health_check.take_own(events)
        if others:
            self._emit(others)

    # --- around the steps -----------------------------------------------------------------------

    def run_once(self) -> bool:
        """Run a step, then release idle memory and update statistics. Return the step's result."""
        if self.busy_since is None:
            self.busy_since = self._clock()
        num_retired = self._pipeline.meter.num_retired
        worked = self.step()
        self._housekeep(busy=worked or self._stalled)
        self._mark_progress(worked, self._pipeline.meter.num_retired > num_retired)
        return worked

    def run(self) -> None:
        """Run steps until a Stop message."""
        try:
            while not self._stopping:
                if not self.run_once() and not self._stopping:
                    self._wait()
            self._publish(self._commit(self._pipeline.drain()))
            self._kv.step_completed(self._runner.completed_epoch)
            self._kv.write_to_disk(DISK_END_S)
            self.stats = self._snapshot()
        except Exception as error:
            self._journal.record(error, self._running_prompts())
            raise

    def _running_prompts(self) -> list[tuple[int, ...]]:
        running = list(self._scheduler.sequences[0])
        return [each.request.prompt_ids for each in running if each.seq_id != HEALTH_CHECK_ID]

    def record_hang(self) -> BackendFailedError | None:
        """Write to disk what runs in a step that hangs. Return a fault of the memory for K and V
        that may be the cause, or None. Any thread may call this."""
        fault = self._kv.backend_fault()
        self._journal.record(fault or EngineStuckError(), self._running_prompts())
        return fault

    def close(self) -> None:
        """Free the device's memory. Call this last, on the loop's thread."""
        with suppress(Exception):
            self._pipeline.drain()
        self._costs.save()
        if not self._kv.shut_down():
            log.error("the device did not answer at the end: its memory is left to the system")
        self._session.close()

    def warm_up(self, prompts: Sequence[int], answer_tokens: int = WARM_UP_TOKENS) -> float:
        """Run requests with prompts of these lengths together, to prepare kernels and memory.
        Return the seconds of the last step. Raises RuntimeError if a request fails."""
        pooling = self.limits.embedding_size is not None
        params = SamplingParams(max_tokens=0 if pooling else answer_tokens, temperature=0.0)
        for number, length in enumerate(prompts, HEALTH_CHECK_ID):
            # Prompts that differ share no prefix.
            ids = (number % self.limits.vocab_size,) * length
            self._scheduler.add(Request(ids, (params,), request_id=number, pooling=pooling))
        events: list[TokenEvent] = []
        emit, self._emit = self._emit, events.extend
        # Wait until all blocks are free: a block freed after ``evict_prefixes`` would stay cached.
        try:
            while self.run_once() or self._kv.recovering:
                pass
        except Exception as error:
            self._journal.record(error)
            raise
        self._emit = emit
        self._kv.evict_prefixes()
        self._scheduler.counters = EngineStats()
        self._scheduler.sharing.take_decisions()
        seconds = self._pipeline.meter.step_seconds
        self._pipeline.meter = StepMeter()
        broken = [event.message for event in events if event.message]
        if broken:
            raise RuntimeError(f"the model cannot decode: {broken[0]}")
        ended = sum(event.finish is not None for event in events)
        assert ended == len(prompts), "a first request has not ended"
        return seconds

    def use_disk(self, store: RecordStore, way: str, model_name: str) -> None:
        """Keep prefixes in files. ``way`` is all but the model on which the bits of K and V depend,
        ``model_name`` is for people."""
        scheduler = self._scheduler  # a warm-up replaces its budget
        self._kv.use_disk(
            store, lambda *span: scheduler.budget.seconds(*span), way=way, name=model_name
        )

    @property
    def _stalled(self) -> bool:
        """Return True if the engine has sequences. If no step runs, they wait for memory."""
        return self._scheduler.num_running + self._scheduler.num_waiting > 0

    def _mark_progress(self, worked: bool, has_retired: bool) -> None:
        if self._pipeline.depth:
            self.busy_since = self._clock() if has_retired else self.busy_since
        elif worked or not self._stalled or self._kv.transfers_may_end:
            self.busy_since = None  # what waits for the disk is no step that hangs

    def _housekeep(self, busy: bool) -> None:
        now = self._clock()
        self._memory.update(now, busy=busy)
        if busy and self._checks_every_step:
            self._kv.check_invariants()
        if not busy or now - self._stats_at >= STATS_INTERVAL_S:
            self._stats_at = now
            self._memory.evict_under_pressure()
            kv, self.stats = self.stats.kv, self._snapshot()
            self._memory.is_settled = not busy and self.stats.kv == kv and not self._kv.recovering

    def _wait(self) -> None:
        """Wait for a message, or until memory can be released or a stalled sequence can run."""
        timeout_s = STALLED_POLL_S if self._stalled else self._memory.poll_s(self._clock())
        with suppress(queue.Empty):
            message = self.mailbox.get(timeout=min(timeout_s, self._kv.disk_poll_s()))
            self._publish(self._handle(message))

    def last_stats(self) -> EngineStats:
        """Return statistics after a fault, or the previous statistics if making new ones fails."""
        with suppress(Exception):
            self.stats = self._snapshot()
        return self.stats

    def _memory_map(self) -> MemoryMap:
        self.stats = self._snapshot()
        running, waiting = map(report_first, self._scheduler.sequences)
        return MemoryMap(self.stats, self._kv.memory_map(), running, waiting)

    def _snapshot(self) -> EngineStats:
        counters, meter = self._scheduler.counters, self._pipeline.meter
        return replace(
            counters,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            steps=meter.num_retired,
            prefix_misses=counters.prefix_misses.copy(),
            mapping_waits=self._kv.mapping_waits,
            token_budget=self._scheduler.budget.tokens,
            step_seconds=meter.step_seconds,
            copied_bytes=self._kv.copied_bytes,
            command_buffers=self._kv.command_buffers,
            drafting=Drafting.OFF if self._scheduler.drafter is None else meter.drafting,
            measured=meter.snapshot,
            mlx=self._mlx_memory(),
            kv=self._kv.stats(),
            disk=self._kv.disk_stats(),
        )
