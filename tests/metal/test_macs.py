"""Which Macs serve which models: the table's figures, and that another checkout is really run."""

from pathlib import Path
from typing import Any

import pytest

from engine.machine import GPU_HEADROOM_BYTES
from tests.metal import macs

GIB = 1024**3
HEAP_BYTES = 64 * 1024**2


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return macs.cases(tmp_path_factory.mktemp("models"), macs.NOT_USED)


@pytest.fixture(scope="module")
def plans(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return macs.plans_of(macs.ROOT, wanted)


def started(wanted: list[dict[str, Any]], plans: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The models that start, by the Mac's GiB."""
    found: dict[int, list[str]] = {}
    for case, plan in zip(wanted, plans, strict=True):
        found.setdefault(case["memory_bytes"] // GIB, []).extend(
            [] if "refused" in plan else [case["model"]]
        )
    return found


def test_a_mac_in_use_serves_what_its_working_set_holds(
    wanted: list[dict[str, Any]], plans: list[dict[str, Any]]
) -> None:
    assert started(wanted, plans) == {
        8: ["0.6B", "4B"],
        16: ["0.6B", "4B", "8B", "14B"],
        24: ["0.6B", "4B", "8B", "14B"],
        32: ["0.6B", "4B", "8B", "14B", "32B"],
        36: ["0.6B", "4B", "8B", "14B", "32B"],
        48: ["0.6B", "4B", "8B", "14B", "32B"],
    }
    for case, plan in zip(wanted, plans, strict=True):
        if "refused" in plan:
            assert "serve a smaller model" in plan["refused"]
            continue
        used = plan["fixed_bytes"] + plan["tokens"] * plan["bytes_per_token"]
        left = case["working_set_bytes"] - GPU_HEADROOM_BYTES - used
        assert 0 <= left < HEAP_BYTES, "nothing but the headroom is left"


def test_what_is_available_at_the_moment_changes_nothing_but_the_warning(
    wanted: list[dict[str, Any]], plans: list[dict[str, Any]]
) -> None:
    idle = [case | {"available_bytes": case["memory_bytes"]} for case in wanted]
    for plan, other in zip(plans, macs.plans_of(macs.ROOT, idle), strict=True):
        assert plan.get("tokens") == other.get("tokens")
        assert not other.get("warning")
    warned = [plan["fixed_bytes"] for plan in plans if plan.get("warning")]
    calm = [plan["fixed_bytes"] for plan in plans if "refused" not in plan and not plan["warning"]]
    assert warned
    assert calm


def test_another_checkout_has_a_column_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(macs, "MEMORIES_GIB", (16,))
    assert macs.main(["--against", str(macs.ROOT)]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert [row[2] for row in rows] == list(macs.MODELS)
    for row in rows:
        assert row[5] == row[7].removesuffix(" |"), "the same code says the same"
    with pytest.raises(OSError, match="python"):
        macs.plans_of(tmp_path, [])


def test_mixtures_and_hybrids_are_planned_as_others_have_found_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(macs, "HYBRID_MEMORIES_GIB", (32, 36, 48))
    assert macs.main(["--hybrids"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    short = [(row[0], row[2]) for row in rows if len(row) > 4 and "2048 *" in row]
    assert short == [("32 GiB", "Qwen3.6-35B-A3B")]
    apart = {
        (row[0], row[1]): float(row[4].split()[0])
        for row in rows
        if len(row) == 6 and "%" in row[4]
    }
    assert len(apart) == len(macs.MEASURED)
    for (model, what), percent in apart.items():
        if what.startswith(("MLX's active memory", "the smallest Mac", "context on a Mac")):
            assert abs(percent) < 5
        if what.startswith("the process when it is idle"):
            measured = next(its for its in macs.MEASURED if (its.model, its.what) == (model, what))
            gone = -percent / 100 * measured.amount
            assert 0.6 < gone < 1.0, "an interpreter and its libraries"
