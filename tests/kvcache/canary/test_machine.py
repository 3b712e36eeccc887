import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.canary import machine
from kvcache.canary.machine import installed_mlx, this_machine


def test_this_machine_has_a_name_for_everything() -> None:
    its = this_machine()
    assert all(its.as_json().values())
    assert its.mlx == importlib.metadata.version("mlx")


def test_linux_names_its_kernel_and_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert this_machine().processor == "unknown"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert this_machine().processor == "unknown"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 3000\n")
    assert this_machine().processor == "Abacus 3000"
    assert platform.release() in this_machine().system


def test_a_mac_names_its_model_and_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"hw.model": "Mac15,6\n", "machdep.cpu.brand_string": "Apple M3 Pro\n"}

    def sysctl(command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=names.get(command[-1], ""))

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.4", ("", "", ""), "arm64"))
    monkeypatch.setattr(subprocess, "run", sysctl)
    its = this_machine()
    assert (its.model, its.processor) == ("Mac15,6", "Apple M3 Pro")
    assert its.system == "macOS 26.4 (unknown)"


def test_mlx_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed_mlx() == "not installed"
