"""An MLP of experts alone, at Qwen3-30B-A3B's shape in bfloat16 and in 4 bits: how much of the
memory's speed one row reaches, with each instruction set of this machine.

What is compared runs in turns, so that a disturbance of the machine meets all sides.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import cycle
from typing import Literal

import mlx.core as mx

import metal_ext
from tests.bench.limits import ReadProbe
from tests.bench.peers import BrokenError
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Row

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
BITS, GROUP = 4, 64
EPS = 1e-6
# More than most last-level caches hold; experts of a layer take 340 MB.
PROBE_BYTES = 256 * 1024**2
READ_PASSES = 3
# One behind the other, as the layers of a model are; each of other experts.
ROWS = 48
TARGET = 0.7
# An MLP of as many bytes that is one matrix, in turns of as many as no cache holds.
DENSE_MLPS = 12
DENSE_TARGET = 0.9


Form = Literal["bfloat16", "4 bits"]
FORMS: tuple[Form, ...] = ("bfloat16", "4 bits")
Codes = tuple[mx.array, mx.array, int, int] | None


class Mixture:
    """Experts that are alike, which no kernel knows."""

    def __init__(self, workers: metal_ext.CpuWorkers, form: Form) -> None:
        gate, of_gate = _stack(INNER, HIDDEN, form)
        self._gate_up = metal_ext.PackedExperts([gate, gate], workers, [of_gate, of_gate])
        down, of_down = _stack(HIDDEN, INNER, form)
        self._down = metal_ext.PackedExperts([down], workers, [of_down])
        routes = mx.random.normal((EXPERTS, HIDDEN), key=mx.random.key(1))
        self._router = metal_ext.PackedLinear([routes], workers, [])
        self._norm = mx.ones((HIDDEN,))

    @property
    def row_bytes(self) -> int:
        """Of the experts that a row is multiplied with."""
        return CHOSEN * (self._gate_up.nbytes + self._down.nbytes) // EXPERTS

    def run(self, x: mx.array, workers: metal_ext.CpuWorkers) -> mx.array:
        return metal_ext.mixture_mlp(
            x,
            self._norm,
            EPS,
            self._router,
            self._gate_up,
            self._down,
            CHOSEN,
            True,
            None,
            workers,
        )


class Dense:
    """An MLP as large as the experts of a row, which every row passes."""

    def __init__(self, workers: metal_ext.CpuWorkers, form: Form) -> None:
        inner = CHOSEN * INNER
        gate, of_gate = _matrix(inner, HIDDEN, form)
        down, of_down = _matrix(HIDDEN, inner, form)
        self._mlps = [
            (
                metal_ext.PackedLinear([gate, gate], workers, [of_gate, of_gate]),
                metal_ext.PackedLinear([down], workers, [of_down]),
            )
            for _ in range(DENSE_MLPS)
        ]
        self._norm = mx.ones((HIDDEN,))
        self._next = cycle(self._mlps)

    def run(self, x: mx.array, workers: metal_ext.CpuWorkers) -> mx.array:
        gate_up, down = next(self._next)
        return metal_ext.gated_mlp(x, self._norm, EPS, gate_up, down, workers)


def run_experts(rounds: Rounds, threads: int) -> Part:
    """Of one row. Raises BrokenError where instruction sets do not agree."""
    every = {name: metal_ext.CpuWorkers(threads, name) for name in metal_ext.instruction_sets()}
    rows = [mx.random.normal((1, HIDDEN), key=mx.random.key(n)) for n in range(ROWS)]
    mx.eval(rows)
    found: list[Row] = []
    with ReadProbe(PROBE_BYTES, threads) as probe:
        for form in FORMS:
            seen = _measured(rounds, form, rows, every, probe)
            for name in every:
                ours, what = seen[f"experts {name}"], f"experts, one row, {form}, {name}"
                for peer, theirs, target in (
                    ("reading alone", seen["read"], TARGET),
                    ("one MLP of as many bytes", seen[f"dense {name}"], DENSE_TARGET),
                ):
                    found.append(
                        Row.higher_is_better(what, "GB/s of experts", ours, (peer, theirs), target)
                    )
    return Part(found)


def _measured(
    rounds: Rounds,
    form: Form,
    rows: list[mx.array],
    every: Mapping[str, metal_ext.CpuWorkers],
    probe: ReadProbe,
) -> dict[str, list[float]]:
    """GB/s of each kind of MLP with each instruction set, and of the probe."""
    first = next(iter(every.values()))
    mixture, dense = Mixture(first, form), Dense(first, form)
    results = [mixture.run(rows[0], workers) for workers in every.values()]
    if not all(mx.allclose(results[0], its, atol=1e-3).item() for its in results):
        raise BrokenError("experts: instruction sets do not agree")
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in rounds:
        seen["read"].append(max(probe.bytes_per_s() for _ in range(READ_PASSES)) / 1e9)
        for name, workers in every.items():
            for kind, mlp in (("experts", mixture), ("dense", dense)):
                seconds = min(_seconds(mlp, rows, workers) for _ in range(READ_PASSES))
                seen[f"{kind} {name}"].append(ROWS * mixture.row_bytes / seconds / 1e9)
    return seen


def _matrix(outputs: int, inputs: int, form: Form) -> tuple[mx.array, Codes]:
    drawn = mx.random.normal((outputs, inputs), key=mx.random.key(outputs)) * 0.02
    if form == "bfloat16":
        return drawn.astype(mx.bfloat16), None
    words, scales, biases = mx.quantize(drawn.astype(mx.bfloat16), GROUP, BITS)
    return words, (scales, biases, BITS, GROUP)


def _stack(outputs: int, inputs: int, form: Form) -> tuple[mx.array, Codes]:
    """The same matrix for every expert."""
    words, codes = _matrix(outputs, inputs, form)
    stacked = mx.broadcast_to(words, (EXPERTS, *words.shape))
    if codes is None:
        return stacked, None
    scales, biases, *kind = codes
    scales, biases = (mx.broadcast_to(part, (EXPERTS, *part.shape)) for part in (scales, biases))
    return stacked, (scales, biases, kind[0], kind[1])


def _seconds(mlp: Mixture | Dense, rows: list[mx.array], workers: metal_ext.CpuWorkers) -> float:
    begun_s = time.perf_counter()
    mx.eval([mlp.run(row, workers) for row in rows])
    return time.perf_counter() - begun_s
