"""Reports of machines that are not here."""

from dataclasses import replace
from typing import Any

from engine.doctor.report import DoctorReport, Examination, Extension
from engine.machine import MachineMemory
from kvcache.canary.machine import Machine
from kvcache.canary.report import Step, TrialReport
from kvcache.substrates import MetalDevice, Substrate

GIB = 1024**3
PASSED = TrialReport(
    (Step("map", True, "two blocks", 0.1), Step("end", True, "in order", 0.1)), "", 1.5
)
FAILED = TrialReport((Step("map", False, "refused", 0.1),), "map: refused", 0.5)
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
NO_TEST = Examination(Substrate.SPARSE, "", PASSED, PASSED, releases_heaps=False)
MAC = DoctorReport(
    machine=Machine("Mac15,6", "Apple M3 Pro", "macOS 26.4 (25E246)", "0.32.4"),
    python="3.12.1",
    extension=Extension("0.32.4", "", SAID),
    device=DEVICE,
    memory=MachineMemory(12 * GIB, 10 * GIB, 9 * GIB),
    headroom_bytes=3 * GIB,
    examinations=(
        NO_TEST,
        Examination(Substrate.PAGED, "", FAILED),
        Examination(Substrate.METAL_DENSE, "the device's memory is not the processor's"),
        Examination(Substrate.POSIX, "", PASSED, PASSED),
    ),
    chosen=Substrate.SPARSE,
    maps_while_running=False,
    reasons=("sparse on Metal: it passed its canary",),
)


def with_sparse(**changes: Any) -> DoctorReport:
    """The Mac, with something else about its sparse substrate."""
    return replace(MAC, examinations=(replace(NO_TEST, **changes), *MAC.examinations[1:]))
