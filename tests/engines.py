"""Whole engines around RecallModel, small enough for a test, and scripted constraints."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import metal_ext
from engine.build import assemble, build_engine, plan_engine
from engine.client import EngineClient, TokenStream
from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.serving import ServingEngine
from engine.step.loop import Emit, EngineLoop
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.budget import CacheRequest, MemoryDemand, fit
from kvcache.layout import KVFormat, KVShape, KVSpec
from metal_ext import SYSTEM_PAGE_BYTES
from tests.recall import RecallModel

Allowed = Callable[[list[int]], set[int] | None]
"""From the tokens that were accepted: which may follow; None: all."""


@dataclass
class Scripted:
    """A constraint that follows a function of the accepted tokens."""

    allowed: Allowed
    accepted: list[int] = field(default_factory=list)
    fills_until: int | None = None
    """The number of accepted tokens at which its mask fails."""
    accepts_until: int | None = None
    """The number of accepted tokens after which the next one fails."""
    copies: "list[Scripted]" = field(default_factory=list)

    def fill_mask(self, row: np.ndarray) -> bool:
        if len(self.accepted) == self.fills_until:
            raise ValueError("text of an answer")
        tokens = self.allowed(self.accepted)
        if tokens is None:
            return False
        row.fill(0)
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token_id: int) -> None:
        if len(self.accepted) == self.accepts_until:
            raise ValueError("text of an answer")
        self.accepted.append(token_id)

    def __deepcopy__(self, _: dict[int, Any]) -> "Scripted":
        made = Scripted(self.allowed, [*self.accepted], self.fills_until, self.accepts_until)
        self.copies.append(made)
        return made


def every_third(vocab_size: int) -> Allowed:
    """Allow a third of all tokens; which one depends on each token before, and on their number."""

    def allowed(accepted: list[int]) -> set[int]:
        return set(range((sum(accepted) + len(accepted)) % 3, vocab_size, 3))

    return allowed


MIB = 1024**2
VOCAB = 1000
# A page of this system is 16 tokens: heads of 32 numbers where it has 4 KiB.
PAGE_BYTES = SYSTEM_PAGE_BYTES
SHAPE = KVShape.uniform(2, KVSpec(2, PAGE_BYTES // (16 * 2 * 4), KVFormat.FLOAT32))
BLOCK_BYTES = 2 * len(SHAPE.layers) * PAGE_BYTES

CONFIG = EngineConfig(
    kv_backend="posix",
    release_heaps=False,
    residency_keep_s=0.0,
    page_bytes=PAGE_BYTES,
    heap_bytes=4 * BLOCK_BYTES,
    kv_budget_bytes=64 * BLOCK_BYTES,
    free_slack_bytes=4 * BLOCK_BYTES,
    headroom_bytes=0,
    mlx_cache_bytes=16 * MIB,
    max_model_len=400,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    step_time_target_ms=1e6,  # how long steps take steers nothing
    threads=1,
    activations="float32",  # answers equal mlx-lm's in float32, on any processor
    idle_release_s=0.05,
    prefix_cache=True,
    prefix_keep_s=0.05,
    max_sharers=1000,
    check_every_step=True,
    max_step_mask_s=1.0,
    grammar_bytes=0,
    overlap=False,
    drafts=False,  # some models say what a script tells them, row by row
)
MACHINE = MachineMemory(1024 * MIB, 1024 * MIB)
ON_CPU = {"posix": KVBackendChoice(KVBackend.POSIX, ("as the test wants it",))}


def recall_loop(
    emit: Emit,
    *,
    shape: KVShape = SHAPE,
    model: Callable[[KVShape, int], RecallModel] = RecallModel,
    model_max_len: int = 4096,
    pools: bool = False,
    **changes: Any,
) -> EngineLoop:
    """Return an engine of the calling thread. pools: for vectors, which are RecallModel's logits at
    length 1. changes: fields of EngineConfig."""
    config = replace(CONFIG, **changes)
    choice = ON_CPU[config.kv_backend]
    request = CacheRequest(
        kv_backend=choice.kv_backend,
        settings=config,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    demand = MemoryDemand(MACHINE.total_bytes, MACHINE.available_bytes, 0, 0, 0, 0)
    memory = fit(demand, request, shape, model_max_len=model_max_len, system_page_bytes=PAGE_BYTES)
    return assemble(
        memory,
        config,
        model(shape, VOCAB),
        VOCAB,
        choice,
        metal_ext.CpuWorkers(1),
        b"recall",
        emit,
        embedding_size=VOCAB if pools else None,
    )


def built_loop(folder: Path, config: EngineConfig, emit: Emit) -> EngineLoop:
    """Return an engine of the calling thread for the model in a folder."""
    memory = MachineMemory(8 << 30, 4 << 30)
    plan = plan_engine(config, read_checkpoint(folder), memory, ON_CPU["posix"])
    return build_engine(plan, config, lambda *_: None, emit)


def steps(loop: EngineLoop) -> Iterator[bool]:
    """Run the loop until no request runs or waits. Yield whether a step did something: none does
    while the memory of the next one is on its way back, on a thread of its own."""
    while (worked := loop.run_once()) or loop._scheduler.num_running + loop._scheduler.num_waiting:
        yield worked


def run_dry(loop: EngineLoop) -> None:
    """Run the loop until nothing is left to do."""
    for _ in steps(loop):
        pass


def use_clock(loop: EngineLoop, clock: Callable[[], float]) -> None:
    """Give a clock to an engine that was built."""
    loop._clock = loop._pipeline._clock = clock


def started(
    build: Callable[[Emit], EngineLoop],
    *,
    max_queue: int = 64,
    max_backlog: int = 4096,
    **more: Any,
) -> EngineClient:
    """Return a started engine on a thread of its own; stop it when done."""
    client = EngineClient(build, max_queue=max_queue, max_backlog=max_backlog, **more)
    client.start()
    return client


def recall_client(**changes: Any) -> EngineClient:
    """As ``started``."""
    return started(lambda emit: recall_loop(emit, **changes))


@dataclass
class Answers:
    """The events of a loop that is stepped by hand."""

    tokens: dict[int, list[int]]
    finished: dict[int, FinishReason]
    messages: dict[int, str | None]

    @classmethod
    def empty(cls) -> "Answers":
        return cls({}, {}, {})

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the end"
            if event.token_id is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish is not None:
                self.finished[event.request_id] = event.finish
                self.messages[event.request_id] = event.message


def request_of(
    request_id: int, prompt: Iterable[int], *params: SamplingParams, **fields: Any
) -> Request:
    """Return a request as the engine's client makes it, with an answer for each of ``params``."""
    return Request(tuple(prompt), params, request_id=request_id, **fields)


def greedy(request_id: int, prompt: Iterable[int], max_tokens: int) -> Request:
    return request_of(request_id, prompt, SamplingParams(max_tokens, temperature=0.0))


def submit(
    engine: ServingEngine, prompt: Iterable[int], params: SamplingParams, **fields: Any
) -> TokenStream:
    """Submit a request for one answer."""
    (stream,) = engine.submit(Request(tuple(prompt), (params,), **fields))
    return stream
