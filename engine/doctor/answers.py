"""What only a Mac can say, by name: the answers to what metal_ext/README.md asks of Macs."""

import platform
from collections.abc import Callable
from typing import Any

from engine.doctor.report import DoctorReport, Examination
from kvcache.canary.report import TrialReport


def answers(report: DoctorReport) -> dict[str, Any]:
    """Return the answers by names that keep their meaning and stay; None where nothing was or could
    be asked."""
    said, memory, device = report.extension.said, report.memory, report.device
    return {
        "open_files": said.get("open_files"),
        "default_device": {
            "device": said.get("default_device"),
            "system_page_bytes": said.get("system_page_bytes"),
        },
        "kernels": _of_each(report, lambda examination: _outcome(examination.kernels)),
        "mapping_while_commands_run": _of_each(
            report, lambda examination: _outcome(examination.stress, "end")
        ),
        "time_after_a_pause": _figures(report.pace, "pause"),
        "memory_pressure": report.pressure,
        "memory": {
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "working_set_bytes": None if device is None else device.working_set_bytes,
        },
        "commands_ahead": _figures(report.pace, "submit"),
        "mlx_metal_wheel": {
            "tag": report.wheel,
            "system": platform.mac_ver()[0],
            "warning": report.wheel_warning,
        },
        "buffers_of_real_size": _of_each(
            report, lambda examination: _outcome(examination.canary, "real buffers", "last block")
        ),
    }


def _of_each(report: DoctorReport, answer: Callable[[Examination], Any]) -> dict[str, Any]:
    """Return the answers by the names of the GPU's substrates."""
    return {
        each.substrate.setting: answer(each)
        for each in report.examinations
        if each.substrate.on_gpu
    }


def _outcome(trial: TrialReport | None, *steps: str) -> dict[str, Any] | None:
    """Return whether it passed, with the figures of some steps."""
    if trial is None:
        return None
    figures = {
        name: value for step in steps for name, value in (_figures(trial, step) or {}).items()
    }
    return {"passed": trial.passed, "fault": trial.fault, **figures}


def _figures(trial: TrialReport | None, step: str) -> dict[str, int | float] | None:
    found = [] if trial is None else [each for each in trial.steps if each.name == step]
    return {**found[0].figures, "seconds": found[0].seconds} if found else None
