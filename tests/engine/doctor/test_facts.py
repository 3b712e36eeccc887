import json
import resource
import runpy
import sys

import pytest

import metal_ext
from engine.doctor.facts import facts
from tests.kvcache.metal_double import install


def test_the_extension_says_what_it_is() -> None:
    said = facts()
    assert said["mlx_built_for"]
    assert said["has_metal"] == metal_ext.HAS_METAL
    assert said["system_page_bytes"] == metal_ext.SYSTEM_PAGE_BYTES
    assert said["instruction_sets"] == metal_ext.instruction_sets()
    assert json.loads(json.dumps(said)) == said


def test_a_metal_build_says_what_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(monkeypatch)
    assert facts()["metal"] == device.said


@pytest.mark.parametrize("metal", [False, True])
def test_it_says_who_multiplies(monkeypatch: pytest.MonkeyPatch, metal: bool) -> None:
    monkeypatch.setattr(metal_ext, "HAS_METAL", metal)
    monkeypatch.setattr(metal_ext, "metal_capabilities", dict, raising=False)
    assert facts()["matrix_products"] == ("MLX's own" if metal else "quire's own")


def test_it_is_a_program_that_writes_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "engine.doctor.facts")
    runpy.run_module("engine.doctor.facts", run_name="__main__")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == facts()


def test_the_limits_of_open_files_are_told_and_what_becomes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    assert facts()["open_files"] == {"soft": 256, "hard": None, "raised": 256}
