import re
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.machine import MachineMemory
from engine.planning.devices import find_device
from kvcache.backends.choice import MetalDevice
from server.cli import plan as command
from server.cli.model_files import ModelError
from server.cli.plan import Target, plan_model
from server.config import SettingError
from tests.engine.planning.test_capacity import FOUR_BITS, MODELS
from tests.models import TINY, write_config, write_model
from tests.server.hub_server import Hub

GIB = 1024**3
M4: dict[str, Any] = {"device": "M4 Pro", "memory": "24GiB", "context": 2048}
NARROW = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def test_a_plan_needs_no_more_than_a_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "machine_memory", lambda: MachineMemory(3 * GIB, 2 * GIB))
    text = plan_model(str(tiny_model), None)
    assert text.startswith("fits                  yes, on a CPU with 3.00 GiB: weights take ")
    assert "KV backend: " in text, "how it would lie in this machine's memory is in the details"
    assert "32768 each" in text
    assert "--out FOLDER" in text


def five_lines(text: str) -> dict[str, str]:
    """The first lines, by their names."""
    lines = text.split("\n\n")[0].splitlines()
    assert len(lines) == 5
    return dict(re.split("  +", line, maxsplit=1) for line in lines)


def test_a_plan_begins_with_five_answers(qwen3_4b: Path) -> None:
    """4022 million numbers of 2 bytes, and 144 KiB a token, at 273 GB/s and 8.1 Tops/s."""
    text = plan_model(str(qwen3_4b), None, device="M4 Pro", memory="24GiB")
    assert five_lines(text) == {
        "fits": "yes, on M4 Pro with 24.00 GiB: weights take 7.49 GiB, K and V up to 6.15 GiB",
        "context": "40960 tokens",
        "chats at once": "10 of 4096 tokens, 1 of 40960 tokens",
        "tokens/s of one chat": "29 at 1k, 17 at 32k tokens of context (computed, not measured: "
        "273 GB/s)",
        "first token": "5.9 s for a prompt of 4k tokens (computed, not measured: 8.1 Tops/s)",
    }
    assert "This machine" not in text


@pytest.mark.parametrize(
    ("model", "device", "memory", "fits", "context", "speed"),
    [
        ("Qwen3-4B", "M1", "8GiB", "no, not on M1 with", "6720 tokens in 4 bits of the", "24 at"),
        ("Qwen3-4B", "M1", "3GiB", "no, not on M1 with", "none", "none"),
        ("Qwen3-30B-A3B", "M3 Max", "36GiB", "no, not on M3 Max", "40960 tokens in 4 bits", "95 "),
        ("Qwen3-30B-A3B-4bit", "M3 Max", "36GiB", "yes, on M3 Max", "40960 tokens", "95 at"),
        ("Qwen3.6-27B-4bit", "M4 Pro", "24GiB", "no, not on M4 Pro", "none", "none"),
        ("Qwen3.6-27B-4bit", "M5 Max", "36GiB", "yes, on M5 Max", "117760 tokens of the", "27 at"),
        ("Qwen3.6-35B-A3B-4bit", "M5 Max", "64GiB", "yes, on M5 Max", "262144 tokens", "206 at"),
    ],
)
def test_what_does_not_fit_is_answered_for_four_bits(
    tmp_path: Path, model: str, device: str, memory: str, fits: str, context: str, speed: str
) -> None:
    name = model.removesuffix("-4bit")
    packing = {"quantization": FOUR_BITS} if model != name else {}
    folder = MODELS[name].write(tmp_path, **packing)
    lines = five_lines(plan_model(str(folder), None, device=device, memory=memory))
    assert lines["fits"].startswith(fits)
    assert lines["context"].startswith(context)
    assert lines["tokens/s of one chat"].startswith(speed)
    assert (lines["first token"] == "none") == (speed == "none")


def test_bonsai_2_has_a_long_context_on_a_mac_of_24_gib(tmp_path: Path) -> None:
    folder = MODELS["Bonsai-2-27B"].write(tmp_path)
    for context, longest in ((None, 74_752), (73_721, 73_721)):
        lines = five_lines(plan_model(str(folder), None, **(M4 | {"context": context})))
        assert lines["fits"].startswith("yes, on M4 Pro with 24.00 GiB: weights take 7.09 GiB")
        assert lines["context"].startswith(f"{longest} tokens of the 262144")
        assert lines["chats at once"].endswith(f", 1 of {longest} tokens")


@pytest.mark.parametrize(
    ("device", "fits"),
    [
        ("cpu", "yes, on a CPU"),
        ("M4", "no, not on M4 .* heads of 64 dimensions, and the GPU's kernels know 128: serve it"),
    ],
)
def test_what_a_gpu_cannot_run_is_told(tmp_path: Path, device: str, fits: str) -> None:
    folder = MODELS["Qwen3.5-0.8B"].write(tmp_path, **NARROW)
    assert re.match(fits, five_lines(plan_model(str(folder), None, device=device))["fits"])


def test_a_short_context_has_one_speed(tmp_path: Path) -> None:
    folder = write_config(tmp_path, TINY, max_position_embeddings=700, head_dim=64)
    lines = five_lines(plan_model(str(folder), None, device="M1"))
    assert lines["chats at once"] == "32 of 700 tokens"
    assert re.match(r"\d+ at 700 tokens of context", lines["tokens/s of one chat"])
    assert "prompt of 700 tokens" in lines["first token"]


def test_this_mac_is_planned_by_what_its_gpu_may_use(
    qwen3_4b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = MetalDevice("M4", working_set_bytes=12 * GIB, max_buffer_bytes=9 * GIB)
    monkeypatch.setattr(command, "machine_memory", lambda: MachineMemory(16 * GIB, 2 * GIB))
    monkeypatch.setattr(command, "metal_device", lambda: device)
    monkeypatch.setattr(command, "this_device", lambda: find_device("M4"))
    target = Target.of(None, None)
    assert target.here
    assert (target.device.memory_bytes, target.device.working_set_bytes) == (16 * GIB, 12 * GIB)
    assert not Target.of(None, "16GiB").here


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no-such-model", "there is no such folder"),
        ("someone/no-such-model", "the hub does not have it, or it is private"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(hub: Hub, name: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        plan_model(name, None)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"model\.safetensors: the file has 0 bytes"):
        plan_model(str(folder), None, **M4)


def test_settings_that_do_not_fit_are_named(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[cache]\nkv_budget = '900000GiB'\n")
    lines = five_lines(plan_model(str(tiny_model), file))
    assert "the KV budget of 900000.00 GiB" in lines["fits"]
    assert lines["context"] == "none"


def test_the_memory_is_the_devices_unless_told_otherwise(qwen3_4b: Path) -> None:
    text = plan_model(str(qwen3_4b), None, device="m1-pro", context=2048)
    assert "on M1 Pro with 32.00 GiB" in text
    assert five_lines(text)["context"] == "2048 tokens of the 40960 that the model knows"


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
        (M4, "not a multiple of this system's 16384 bytes"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(
    qwen3_4b: Path, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[cache]\npage_size = 4096\n")
    with pytest.raises(SettingError, match=problem):
        plan_model(str(qwen3_4b), file, **options)


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
