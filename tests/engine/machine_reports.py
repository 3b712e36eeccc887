"""Reports of machines that are not here."""

from dataclasses import replace
from typing import Any

from engine.machine import MachineMemory
from engine.selftest import Extension, KVBackendReport, MachineReport
from kvcache.backends.choice import KVBackend, MetalDevice
from kvcache.selftest.machine import Machine
from kvcache.selftest.run import Result, SelfTest, SelfTestReport

GIB = 1024**3
PASSED = SelfTestReport(
    (
        Result("two blocks", name="map", seconds=0.1),
        Result("in order", name="end", seconds=0.1),
    ),
    "",
    1.5,
)
FAILED = SelfTestReport((Result("refused", {}, "map", False, 0.1),), "map: refused", 0.5)
DEVICE = MetalDevice(
    "Apple M3 Pro",
    working_set_bytes=12 * GIB,
    max_buffer_bytes=9 * GIB,
    said={
        "name": "Apple M3 Pro",
        "families": ["apple9", "metal4"],
        "unified_memory": True,
        "residency_sets": False,
        "sort": 3,
        "recommended_working_set_bytes": 12 * GIB,
        "max_buffer_bytes": 9 * GIB,
        "missing_for_sparse": [],
    },
)
SAID: dict[str, Any] = {
    "mlx_built_for": "0.32.4",
    "has_metal": True,
    "metal": DEVICE.said,
    "instruction_sets": ["neon"],
}
USUAL_TESTS = {SelfTest.KV_BACKEND: PASSED, SelfTest.KERNELS: PASSED}
NO_TEST = KVBackendReport(KVBackend.SPARSE, "", USUAL_TESTS, releases_heaps=False)
MAC = MachineReport(
    machine=Machine("Mac15,6", "Apple M3 Pro", "macOS 26.4 (25E246)", "0.32.4"),
    python="3.12.1",
    extension=Extension("0.32.4", "", SAID),
    device=DEVICE,
    memory=MachineMemory(12 * GIB, 10 * GIB, 9 * GIB),
    headroom_bytes=3 * GIB,
    kv_backends=(
        NO_TEST,
        KVBackendReport(KVBackend.PAGED, "", {SelfTest.KV_BACKEND: FAILED}),
        KVBackendReport(KVBackend.METAL_DENSE, "the device's memory is not the processor's"),
        KVBackendReport(KVBackend.POSIX, "", USUAL_TESTS),
    ),
    chosen=KVBackend.SPARSE,
    maps_while_running=False,
    reasons=("sparse on Metal: it passed its canary",),
)


def with_sparse(
    tests: dict[SelfTest, SelfTestReport] | None = None, **changes: Any
) -> MachineReport:
    """The Mac, with something else about its sparse backend, and further tests of it."""
    sparse = replace(NO_TEST, tests=USUAL_TESTS | (tests or {}), **changes)
    return replace(MAC, kv_backends=(sparse, *MAC.kv_backends[1:]))
