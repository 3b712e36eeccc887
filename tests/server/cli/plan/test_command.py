import sys
from pathlib import Path
from typing import Any

import pytest

from engine.machine import MachineMemory
from engine.planning import capacity
from engine.planning.devices import find_device
from kvcache.kv_backends import MetalDevice
from server.cli import plan as command
from server.cli.model_files import ModelError
from server.cli.plan import plan_model
from server.config import SettingError
from tests.models import TINY, write_config, write_model
from tests.server.hub_server import Hub

GIB = 1024**3
M4: dict[str, Any] = {"device": "M4 Pro", "memory": "24GiB", "context": 2048}


def test_a_plan_needs_no_more_than_a_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "machine_memory", lambda: MachineMemory(3 * GIB, 2 * GIB))
    text = plan_model(str(tiny_model), None)
    assert "kv_backend: " in text, "how it would lie in this machine's memory comes first"
    assert "Capacity on cpu with 3.00 GiB" in text
    assert "at 32768 tokens" in text
    assert "--out FOLDER" in text


def test_a_mac_is_planned_by_what_its_gpu_may_use(
    qwen3_4b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving leaves 1.5 GiB of the GPU's working set to others, and so does a plan."""
    monkeypatch.setattr(capacity, "_crowd", lambda *_: None)
    said = " ".join(plan_model(str(qwen3_4b), None, memory="16GiB", device="M4 Pro").split())
    assert "Its GPU may use 10.67 GiB of these" in said
    assert "1.50 are left to other programs" in said
    assert "For 16.00 GiB and 32768 tokens: q4 weights are the widest" in said
    device = MetalDevice("M4", working_set_bytes=12 * GIB, max_buffer_bytes=9 * GIB)
    monkeypatch.setattr(command, "machine_memory", lambda: MachineMemory(16 * GIB, 2 * GIB))
    monkeypatch.setattr(command, "metal_device", lambda: device)
    monkeypatch.setattr(command, "this_device", lambda: find_device("M4"))
    here = plan_model(str(qwen3_4b), None)
    assert "Capacity on M4 with 16.00 GiB\n  Its GPU may use 12.00 GiB of these" in here


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        plan_model("no-such-model", None)


def test_a_model_that_the_hub_does_not_have_is_refused(hub: Hub) -> None:
    with pytest.raises(ModelError, match="there is no such repository, or it is private"):
        plan_model("someone/no-such-model", None)


def test_weights_are_not_needed(qwen3_4b: Path) -> None:
    text = plan_model(str(qwen3_4b), None, **M4)
    assert text.startswith(f"This machine: {qwen3_4b} holds no weights")
    assert "4022 million parameters" in text


def test_broken_weights_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.safetensors: the file has 0 bytes"):
        plan_model(str(folder), None, **M4)


def test_a_machine_that_is_too_small_is_no_reason_not_to_plan_another(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[cache]\nkv_budget = '900000GiB'\n")
    text = plan_model(str(tiny_model), file, **M4)
    assert text.startswith("This machine cannot serve it: the KV budget of 900000.00 GiB")
    assert "Capacity on M4 Pro" in text


def test_the_context_is_what_the_model_knows_unless_told_otherwise(tmp_path: Path) -> None:
    folder = write_config(tmp_path, TINY, max_position_embeddings=700)
    assert "at 700 tokens" in plan_model(str(folder), None, device="M1")


def test_the_memory_is_the_devices_unless_told_otherwise(qwen3_4b: Path) -> None:
    text = plan_model(str(qwen3_4b), None, device="m1-pro", context=2048)
    assert "Capacity on M1 Pro with 32.00 GiB" in text


def test_pictures_go_where_they_are_wanted(qwen3_4b: Path, tmp_path: Path) -> None:
    out = tmp_path / "some" / "where"
    text = plan_model(str(qwen3_4b), None, device="M4", memory="24GiB", context=2048, out=out)
    names = sorted(file.name for file in out.iterdir())
    assert names == sorted(text.partition(f"Pictures: {out}\n")[2].split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "M9"}, r"--device 'M9' is not known; known are M1, M1 Pro"),
        ({"memory": "lots"}, r"--memory 'lots' is not a size such as 24GiB"),
        ({"context": 1}, r"--context is 1 tokens; it must be 2 at least"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(
    qwen3_4b: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingError, match=problem):
        plan_model(str(qwen3_4b), None, **options)


def test_a_page_that_does_not_suit_the_device_is_refused(qwen3_4b: Path, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[cache]\npage_size = 4096\n")
    with pytest.raises(SettingError, match="not a multiple of this system's 16384 bytes"):
        plan_model(str(qwen3_4b), file, **M4)


def test_pictures_without_matplotlib_say_how_to_get_it(
    qwen3_4b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "server.cli.plan_pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--out FOLDER" in plan_model(str(qwen3_4b), None)
    with pytest.raises(SettingError, match="pip install 'quire"):
        plan_model(str(qwen3_4b), None, out=tmp_path)


def test_pictures_that_cannot_be_written_are_refused(qwen3_4b: Path, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(SettingError, match=r"--out .*taken: File exists"):
        plan_model(str(qwen3_4b), None, device="M4", memory="24GiB", context=2048, out=file)
