"""What the host does for every stream in every step: ``python -m tests.bench.hostwork``.

A server in a process of its own serves a small random model to some streams at once. Stopwatches of
processor time stand around the parts of a step, on the engine's thread and on the event loop's, so
that waiting counts for nothing. Only steps count in which most streams got a token.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import server.routes.answering
from engine.client import EngineClient
from engine.step.loop import EngineLoop
from engine.step.runner import ModelRunner, ModelStep
from engine.step.scheduler import Scheduler
from engine.types import TokenEvent
from kvcache.manager import KVCacheManager
from server.cli.serve import serve_model
from tests.bench.load import Load, Target, run_load
from tests.bench.models import SERVING, write_endless_model

STREAMS = (8, 64, 256)
PROMPT_CHARS = 40
# Streams join one by one: answers last until all have.
LEAST_TOKENS = 200
TOKENS_PER_STREAM = 4
WARM_UP_STEPS = 10
START_LIMIT_S = 60.0
HOST = "127.0.0.1"
ENGINE = (
    ("schedule", Scheduler, "schedule"),
    ("graph", ModelRunner, "begin"),
    ("submit", ModelStep, "submit"),
    ("read", ModelStep, "read"),
    ("commit", Scheduler, "commit"),
    ("hand over", EngineClient, "_emit"),
    ("cache", KVCacheManager, "step_completed"),
)
MLX = ("graph", "submit", "read")
MOST = 0.75
STEP, TURN = "engine, all of a step", "event loop, all of a step"
Micros = dict[str, float]


@dataclass
class Stopwatches:
    """Processor seconds of the parts of each step and for each token, by name."""

    streams: int
    steps: list[Micros] = field(default_factory=list)
    turns: list[Micros] = field(default_factory=list)
    _engine: Micros = field(default_factory=lambda: defaultdict(float))
    _loop: Micros = field(default_factory=lambda: defaultdict(float))
    _said: int = 0
    _turned_at: float | None = None

    def install(self) -> None:
        """Around the parts of engines and servers that are made from now on."""
        for name, owner, method in ENGINE:
            setattr(owner, method, self._timed(getattr(owner, method), name, self._engine))
        step, emit = EngineLoop.step, EngineClient._emit
        event, deliver = server.routes.answering.event, EngineClient._deliver

        def timed_step(loop: EngineLoop) -> bool:
            self._engine.clear()
            self._said = 0
            started = time.thread_time()
            worked = step(loop)
            self._engine[STEP] += time.thread_time() - started
            self._keep(self._engine, self._said, self.steps)
            return worked

        def counted_emit(client: EngineClient, events: list[TokenEvent]) -> None:
            self._said = len(events)
            emit(client, events)

        def timed_deliver(client: EngineClient, events: list[TokenEvent]) -> None:
            now = time.thread_time()
            self._loop[TURN] = now - (self._turned_at or now)
            self._keep(self._loop, len(events), self.turns)
            self._loop.clear()
            self._turned_at = now
            deliver(client, events)
            self._loop["deliver"] += time.thread_time() - now

        patches: Any = EngineLoop, EngineClient
        patches[0].step, patches[1]._emit = timed_step, counted_emit
        patches[1]._deliver = timed_deliver
        server.routes.answering.event = self._timed(event, "encode", self._loop)

    def medians(self) -> Micros:
        """Microseconds per stream and step. Of the event loop's turns these are means: one that
        is behind takes the events of several steps in one turn, and none in the next."""
        found: Micros = {}
        for rows, middle in ((self.steps, statistics.median), (self.turns, statistics.fmean)):
            rows = rows[WARM_UP_STEPS:-1]
            if len(rows) < WARM_UP_STEPS:
                raise RuntimeError(f"only {len(rows)} steps had most of {self.streams} streams")
            for name in sorted({name for row in rows for name in row}):
                found[name] = 1e6 * middle([row.get(name, 0.0) for row in rows])
        return found

    def _keep(self, parts: Micros, tokens: int, rows: list[Micros]) -> None:
        if tokens >= MOST * self.streams:
            rows.append({name: seconds / tokens for name, seconds in parts.items()})

    @staticmethod
    def _timed(call: Callable[..., Any], name: str, into: Micros) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                into[name] += time.thread_time() - started

        return timed


def outside_mlx(medians: Micros) -> float:
    """What is not MLX's: all of both threads, less graph, submission and reading."""
    mlx = sum(medians.get(name, 0.0) for name in MLX)
    return medians[STEP] + medians[TURN] - mlx


def measure(folder: Path, streams: int, tokens: int, overlap: bool) -> Micros:
    """Serves and asks. folder: of the model."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(folder), streams, overlap))
    process.start()
    theirs.close()  # it is the server's alone: so its end is seen here
    try:
        port = _receive(ours, START_LIMIT_S)
        target = Target.of(f"http://{HOST}:{port}/v1", folder.name)
        load = Load(streams, streams, PROMPT_CHARS, tokens, seed=1, time_limit_s=300.0)
        result = asyncio.run(run_load(target, load))
        if result.errors:
            raise RuntimeError(result.errors[0])
        assert process.pid is not None
        process.terminate()
        medians: Micros = json.loads(_receive(ours, START_LIMIT_S))
        return medians | {"tokens per second": result.tokens_per_s}
    finally:
        process.join(START_LIMIT_S)
        process.kill()


def _receive(pipe: Any, limit_s: float) -> Any:
    if not pipe.poll(limit_s):
        raise RuntimeError("the server says nothing")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the server has ended without a word") from None


def _serve(pipe: Any, folder: str, streams: int, overlap: bool) -> None:
    """The server's process: says its port, and at the end its figures."""
    from server.http import listener, server

    watches = Stopwatches(streams)
    watches.install()

    def listen_on(reserved: Any, backlog: int) -> None:
        listener.listen_on(reserved, backlog)
        pipe.send(reserved.getsockname()[1])

    vars(server)["listen_on"] = listen_on
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags: dict[str, dict[str, Any]] = {
        "server": {"host": HOST, "port": 0},
        "engine": {"max_num_seqs": streams, "overlap": overlap, "max_model_len": 2048},
        "cache": {"kv_budget": "2GiB"},
        "log": {"level": "error"},
    }
    with suppress(KeyboardInterrupt):
        serve_model(folder, None, flags)
    pipe.send(json.dumps(watches.medians()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each number of streams."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hostwork", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--tokens", type=int, help="of each answer; more where more streams join")
    parser.add_argument("--no-overlap", action="store_true", help="steps one by one")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = write_endless_model(Path(folder) / "model", SERVING)
        for streams in asked.streams:
            tokens = asked.tokens or max(LEAST_TOKENS, TOKENS_PER_STREAM * streams)
            medians = measure(model, streams, tokens, not asked.no_overlap)
            print(f"\n{streams} streams, microseconds of processor time per stream and step")
            for name, value in medians.items():
                print(f"  {value:9.2f}  {name}")
            print(f"  {outside_mlx(medians):9.2f}  outside MLX", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
