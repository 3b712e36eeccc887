"""Gated delta nets of a decode step at Qwen3.5-0.8B's shape: their share of the step of one stream,
and how they stand beside their bytes at eight.

All recurrent layers run one behind the other, as in a step; their projections are not among them.
A stream reads one cell and writes another, as a copy does: that is what the bytes alone take.
"""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np

import metal_ext
from tests.bench.compare import Case, run_case
from tests.bench.contest import Contest
from tests.bench.models import ModelStore
from tests.bench.peers import Server
from tests.bench.programs import quire
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Row
from tests.metal_ext.deltas import Cells, DeltaLayer, DeltaShape, step
from tests.published import PUBLISHED

MODEL = PUBLISHED["Qwen3.5-0.8B"]
NAMES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
SHAPE = DeltaShape(*(MODEL.fields[f"linear_{name}"] for name in NAMES))
FULL_ATTENTION = MODEL.spec.num_hidden_layers // MODEL.fields["full_attention_interval"]
LAYERS = MODEL.spec.num_hidden_layers - FULL_ATTENTION
STREAMS = (1, 8)
STEPS = 20
# More than last-level caches hold.
COPIED_BYTES = 512 * 1024**2
COPIES = 3
# Of a whole step of one stream, and of what the bytes alone take at eight.
MOST_OF_A_STEP, MOST_OF_THE_BYTES = 0.1, 1.5
CASE = Case(1, 64, 64, 1)


class DeltaStep:
    """The recurrent layers of a step of some streams."""

    def __init__(self, streams: int, workers: metal_ext.CpuWorkers) -> None:
        self._workers = workers
        self._layers = [DeltaLayer(SHAPE, seed) for seed in range(LAYERS)]
        self._cells = [Cells(SHAPE, 2 * streams) for _ in range(LAYERS)]
        inputs = self._layers[0].inputs(streams)
        self._arrays = [mx.array(its) for its in inputs.arrays]
        self._token = mx.zeros((1,))
        mx.eval(self._arrays, self._token)
        for cells in self._cells:
            for cell in range(2 * streams):
                cells.put(cell, self._layers[0].zeros())
        forth = [(1, cell, [(1, streams + cell)]) for cell in range(streams)]
        back = [(1, streams + cell, [(1, cell)]) for cell in range(streams)]
        self._rows = [[cells.rows(segments) for cells in self._cells] for segments in (forth, back)]
        self.state_bytes = streams * LAYERS * 4 * SHAPE.numbers

    def run(self, number: int) -> None:
        token, made = self._token, []
        for layer, cells, rows in zip(
            self._layers, self._cells, self._rows[number % 2], strict=True
        ):
            token, out = step(layer, self._arrays, rows, cells.offset, self._workers, token)
            made.append(out)
        mx.eval(token, made)

    def milliseconds(self) -> float:
        """Of one step: the median of some."""
        taken = []
        for number in range(STEPS):
            begun_s = time.perf_counter()
            self.run(number)
            taken.append(1e3 * (time.perf_counter() - begun_s))
        return float(np.median(taken))


class CopyProbe:
    """Memory that threads copy, each its part; more than caches hold."""

    def __init__(self, size_bytes: int, threads: int) -> None:
        source, target = (np.full(size_bytes, n, np.uint8) for n in (1, 2))
        self._size_bytes = size_bytes
        self._parts = list(
            zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
        )
        self._threads = ThreadPoolExecutor(threads)

    def bytes_per_s(self) -> float:
        """Copied, not read and written: the best of some."""
        taken = []
        for _ in range(COPIES):
            begun_s = time.perf_counter()
            list(self._threads.map(lambda part: np.copyto(*part), self._parts))
            taken.append(time.perf_counter() - begun_s)
        return self._size_bytes / min(taken)


def run_states(rounds: Rounds, contest: Contest, folder: Path) -> Part:
    """Beside a whole server on a model of this shape, bfloat16. folder: where models are kept.
    Raises BrokenError when the server dies."""
    model = ModelStore(folder, MODEL).bfloat16()
    workers = metal_ext.CpuWorkers(contest.threads)
    steps = {streams: DeltaStep(streams, workers) for streams in STREAMS}
    probe = CopyProbe(COPIED_BYTES, contest.threads)
    seen: dict[str, list[float]] = defaultdict(list)
    with Server(quire(model, contest.threads), contest.threads) as server:
        run_case(server, CASE.warm_up(), next(contest.seeds))
        for _ in rounds:
            (answer,) = run_case(server, CASE, next(contest.seeds)).answers
            seen["step"].append(1e3 / answer.decode_per_s)
            copied = probe.bytes_per_s()
            for streams, its in steps.items():
                seen[f"states {streams}"].append(its.milliseconds())
                seen[f"bytes {streams}"].append(1e3 * its.state_bytes / copied)
    one, many = STREAMS

    def row(streams: int, peer: str, theirs: str, least: float | None) -> Row:
        name = f"{LAYERS} gated delta nets, streams: {streams}"
        ours = seen[f"states {streams}"]
        return Row.lower_is_better(name, "ms", ours, (peer, seen[theirs]), least)

    return Part(
        [
            row(one, "the whole step", "step", 1 / MOST_OF_A_STEP),
            row(one, "copying as many bytes", f"bytes {one}", None),
            row(many, "copying as many bytes", f"bytes {many}", 1 / MOST_OF_THE_BYTES),
        ]
    )
