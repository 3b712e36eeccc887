import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.canary import stamp
from kvcache.canary.machine import this_machine
from kvcache.canary.stamp import Passed
from kvcache.substrates import Substrate


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_has_passed_is_remembered_for_its_test_and_its_substrate_alone(folder: Path) -> None:
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
    path = stamp.write(Passed.RELEASE, Substrate.SPARSE)
    assert path.parent == folder / "quire"
    assert stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
    assert not stamp.is_there(Passed.RELEASE, Substrate.PAGED)
    assert not stamp.is_there(Passed.STRESS, Substrate.SPARSE)
    stamp.write(Passed.STRESS, Substrate.SPARSE)
    stamp.withdraw(Passed.RELEASE, Substrate.SPARSE)
    stamp.withdraw(Passed.RELEASE, Substrate.SPARSE)
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
    assert stamp.is_there(Passed.STRESS, Substrate.SPARSE)


@pytest.mark.parametrize("changed", ["model", "processor", "system", "mlx"])
def test_another_machine_system_or_mlx_must_pass_again(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp.write(Passed.RELEASE, Substrate.SPARSE)
    other = replace(this_machine(), **{changed: "another"})
    monkeypatch.setattr(stamp, "this_machine", lambda: other)
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)


@pytest.mark.parametrize("contents", ["", "{}", "[", '{"passed": "something else"}'])
def test_a_file_that_says_something_else_is_no_stamp(contents: str) -> None:
    stamp.write(Passed.RELEASE, Substrate.SPARSE).write_text(contents)
    assert not stamp.is_there(Passed.RELEASE, Substrate.SPARSE)
