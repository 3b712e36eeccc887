import ctypes
import time

import numpy as np
import pytest

from tests.bench import limits
from tests.bench.limits import MachineLimits, ReadProbe, library, measure_limits, product_flop_per_s

MIB = 1024**2
PATIENCE_S = 60.0
MULTIPLIER = 0x9E3779B97F4A7C15


def test_every_way_reads_every_word_once() -> None:
    native = library()
    with ReadProbe(6 * MIB, threads=2) as probe:
        assert probe.size_bytes == 6 * MIB
        sums = set()
        for way in range(native.read_ways()):
            total = ctypes.c_uint64()
            assert native.read_probe_pass(probe._memory, way, 2, ctypes.byref(total)) > 0
            sums.add(total.value)
    words = np.arange(6 * MIB // 8, dtype=np.uint64) * np.uint64(MULTIPLIER)
    assert sums == {int(np.bitwise_xor.reduce(words))}


def test_bandwidth_is_of_the_fastest_way_and_slow_ways_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ReadProbe(2 * MIB, threads=1) as probe:
        asked: list[int] = []

        def seconds(way: int) -> float:
            asked.append(way)
            return {1: 0.25, 2: 0.3}.get(way, 1.0)

        monkeypatch.setattr(probe, "_pass", seconds)
        assert probe.bytes_per_s() == 2 * MIB / 0.25
        assert len(asked) == library().read_ways()
        asked.clear()
        assert probe.bytes_per_s() == 2 * MIB / 0.25
        assert asked == [1, 2], "0.3 is near enough to be the best another time"


def plausible(found: MachineLimits) -> bool:
    """Whether these are figures per second, of any machine that is not all taken up by others."""
    rates = (found.read_bytes, found.float32_flop, found.product_flop)
    return min(rates) > 1e8 and (found.bfloat16_flop == 0 or found.bfloat16_flop > 1e8)


def test_a_machine_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2 * MIB)
    monkeypatch.setattr(limits, "ARITHMETIC_S", 0.01)
    monkeypatch.setattr(limits, "MATRIX_SIZE", 64)
    deadline_s = time.monotonic() + PATIENCE_S
    # What others do on the machine can only slow it down.
    while not plausible(found := measure_limits(threads=2, passes=1)):
        assert time.monotonic() < deadline_s, found
    assert product_flop_per_s(32) > 0
