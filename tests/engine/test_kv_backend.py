"""What stands under K and V on a machine with a GPU, and on one without."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine import kv_backend as engine_kv_backend
from engine.config import EngineConfig
from engine.kv_backend import (
    machine_kv_backend,
    memory_for,
    memory_of_all_models,
    metal_device,
    plan_for_this_machine,
    why_no_metal,
)
from engine.machine import machine_memory
from engine.models.checkpoint import Checkpoint, read_checkpoint
from kvcache.backends.choice import NO_DEVICE, NO_METAL, KVBackend, KVBackendChoice, KVBackendError
from kvcache.backends.faults import FaultMemory
from kvcache.layout import LayoutError
from kvcache.selftest.run import USUAL, SelfTest, SelfTestReport, write_stamp
from tests.engines import CONFIG
from tests.kvcache.metal_double import Device, install
from tests.models import ModelSpec, write_model

Tried = list[tuple[str, KVBackend, int | None]]
PASSED = SelfTestReport((), "", 1.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    """A machine with a GPU, whose user has no caches yet."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return install(monkeypatch)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    """What a canary was sent into; SPARSE does not come back."""
    seen: Tried = []

    def run(
        what: str, kv_backend: KVBackend, page_bytes: int | None, size: object
    ) -> SelfTestReport:
        seen.append((what, kv_backend, page_bytes))
        return SelfTestReport((), "it hung" if kv_backend is KVBackend.SPARSE else "", 1.0)

    monkeypatch.setattr(engine_kv_backend, "run_selftest", run)
    return seen


def chosen(
    setting: Any, *, release_heaps: bool | None = None, map_while_running: bool | None = None
) -> KVBackendChoice:
    config = EngineConfig(
        kv_backend=setting, release_heaps=release_heaps, map_while_running=map_while_running
    )
    return machine_kv_backend(config, lambda _: [(16384, USUAL)])


def choose(asked: str, *, release_heaps: bool = False) -> KVBackend:
    return chosen(asked, release_heaps=release_heaps).kv_backend


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a GPU")
def test_without_metal_the_cpu_serves_and_nothing_is_tried(tried: Tried) -> None:
    assert metal_device() is None
    assert why_no_metal(None) == NO_METAL
    choice = chosen("auto", release_heaps=True)
    assert (choice.kv_backend, choice.reasons) == (KVBackend.POSIX, (f"posix: {NO_METAL}",))
    assert tried == []
    assert memory_for(KVBackend.POSIX).max_buffer_bytes is None
    assert memory_for(KVBackend.POSIX).total_bytes == machine_memory().total_bytes
    with pytest.raises(KVBackendError, match="sparse is memory of a GPU: this build"):
        choose("sparse")


def test_a_build_with_metal_on_a_machine_without_a_device_serves_from_the_cpu(
    device: Device, tried: Tried
) -> None:
    device.said.clear()
    assert metal_device() is None
    assert why_no_metal(None) == NO_DEVICE
    assert choose("auto") is KVBackend.POSIX
    assert tried == []


def test_the_canary_decides_with_the_pages_that_the_cache_will_have(
    device: Device, tried: Tried
) -> None:
    choice = chosen("auto", release_heaps=False)
    assert choice.kv_backend is KVBackend.PAGED
    assert choice.reasons[0] == "not sparse on Metal: it hung"
    assert [(what, kv_backend) for what, kv_backend, _ in tried] == [
        ("kv_backend", KVBackend.SPARSE),
        ("kv_backend", KVBackend.PAGED),
    ]
    assert {page_bytes for _, _, page_bytes in tried} == {16384}


def test_a_wheel_that_does_not_suit_the_chip_and_an_earlier_crash_are_warned_of(
    device: Device, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_kv_backend, "wheel_warning", lambda _: "the wheel is old")
    assert chosen("auto", release_heaps=False).warnings == ("the wheel is old",)
    monkeypatch.setattr(FaultMemory, "warning", lambda _: "a crash")
    warnings = chosen("auto", release_heaps=False).warnings
    assert warnings == ("a crash", "the wheel is old")
    assert chosen("posix", release_heaps=False).warnings == ()


def test_what_the_device_lacks_is_not_tried(device: Device, tried: Tried) -> None:
    device.said["missing_for_sparse"] = ["no queue", "no heaps"]
    with pytest.raises(KVBackendError, match="does not work on this machine: no queue; no heaps"):
        choose("sparse")
    assert tried == []
    assert choose("paged") is KVBackend.PAGED


def test_what_has_failed_here_before_is_passed_by_until_it_is_forgotten(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mock.Mock(return_value=PASSED)
    monkeypatch.setattr(engine_kv_backend, "run_selftest", run)
    FaultMemory(KVBackend.SPARSE).record("a mapping never came back")
    choice = chosen("auto", release_heaps=False)
    assert choice.kv_backend is KVBackend.PAGED
    assert [call.args[1] for call in run.call_args_list] == [KVBackend.PAGED]
    assert "a mapping never came back" in choice.warnings[0]
    with pytest.raises(KVBackendError, match="a mapping never came back"):
        choose("sparse")
    assert not FaultMemory(KVBackend.SPARSE).forget(stressed=False)
    assert FaultMemory(KVBackend.SPARSE).forget(stressed=True)
    assert choose("auto") is KVBackend.SPARSE


def test_heaps_are_released_only_where_the_release_test_has_passed(
    device: Device, tried: Tried
) -> None:
    with pytest.raises(KVBackendError, match=r"release test of paged on Metal has not .*--release"):
        choose("paged", release_heaps=True)
    assert not chosen("paged").releases_heaps
    write_stamp(SelfTest.RELEASE, KVBackend.PAGED)
    assert chosen("paged", release_heaps=True).releases_heaps
    assert chosen("paged").releases_heaps, "it is known to bear that"
    assert not chosen("paged", release_heaps=False).releases_heaps
    assert not chosen("posix", release_heaps=True).releases_heaps, "no heaps"


def test_sparse_memory_is_mapped_between_steps_where_the_stress_test_has_not_passed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_kv_backend, "run_selftest", lambda *_: PASSED)

    def bold(asked: str, wanted: bool | None) -> bool:
        choice = chosen(asked, release_heaps=False, map_while_running=wanted)
        return choice.maps_while_running

    assert not bold("sparse", None)
    assert not bold("sparse", False)
    with pytest.raises(KVBackendError, match=r"stress test of sparse on Metal has not .*--stress"):
        bold("sparse", True)
    assert bold("paged", True), "nothing is mapped there"
    assert bold("posix", None)
    write_stamp(SelfTest.STRESS, KVBackend.SPARSE)
    assert bold("sparse", None)
    assert bold("sparse", True)
    assert not bold("sparse", False)


def test_a_gpu_has_its_own_figures(device: Device) -> None:
    memory = memory_for(KVBackend.SPARSE)
    assert memory.max_buffer_bytes == 1 << 30
    assert memory.total_bytes == min(1 << 32, machine_memory().total_bytes)


# --- the whole plan -----------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    spec = ModelSpec(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    return read_checkpoint(write_model(tmp_path / "model", spec))


def test_a_plan_for_a_gpu_has_its_pages_and_its_budget(
    device: Device, tried: Tried, checkpoint: Checkpoint
) -> None:
    config = replace(CONFIG, kv_backend="auto", page_bytes=None, kv_budget_bytes=None)
    plan = plan_for_this_machine(config, checkpoint)
    assert plan.kv_backend.kv_backend is KVBackend.PAGED
    # A row of two heads of 64 float32: 512 bytes.
    assert plan.memory.layout.groups[0].page_bytes == 16384
    assert tried[0][2] == 16384
    assert plan.memory.demand.machine_bytes <= 1 << 32
    tried.clear()
    plan = plan_for_this_machine(replace(config, page_bytes=262144), checkpoint)
    assert plan.memory.layout.groups[0].page_bytes == 262144
    assert tried[0][2] == 262144


@pytest.mark.parametrize(
    ("families", "sequences", "length", "is_short"),
    [
        ("", 8, 4096, False),
        ("apple5 apple7 apple8", 1, None, False),
        # 80 MiB of addresses for each of 4097 buffers are too many for a quarter of 512 GiB.
        ("apple7 apple8 metal4", 4096, None, True),
        ("apple8 apple9 apple10", 4096, None, False),
    ],
)
def test_a_self_test_has_the_context_and_the_buffers_of_the_plan(
    device: Device, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, families: str,
    sequences: int, length: int | None, is_short: bool,
) -> None:  # fmt: skip
    run = mock.Mock(return_value=PASSED)
    monkeypatch.setattr(engine_kv_backend, "run_selftest", run)
    device.said["families"] = families.split()
    config = replace(CONFIG, kv_backend="sparse", page_bytes=None, kv_budget_bytes=None)
    config = replace(config, max_num_seqs=sequences, max_model_len=length)
    memory = plan_for_this_machine(config, checkpoint).memory
    layout = memory.layout
    size = run.call_args.args[3]
    assert (size.max_tokens, size.buffers) == (layout.max_tokens, memory.max_buffers)
    assert (size.shape, size.heap_bytes) == (layout.shape, layout.heap_bytes)
    assert (memory.max_model_len < (length or 40960)) == is_short


def test_a_page_that_the_gpu_cannot_map_is_refused(
    device: Device, tried: Tried, checkpoint: Checkpoint
) -> None:
    config = replace(CONFIG, kv_backend="paged", page_bytes=4096)
    with pytest.raises(LayoutError, match="none that the device maps: 16384, 65536, 262144"):
        plan_for_this_machine(config, checkpoint)


def test_a_plan_for_a_cpu_is_as_it_was(tiny_model: Path) -> None:
    plan = plan_for_this_machine(replace(CONFIG, kv_backend="posix"), read_checkpoint(tiny_model))
    assert plan.kv_backend.kv_backend is KVBackend.POSIX


def test_several_models_may_use_what_one_alone_may(device: Device) -> None:
    del device
    auto = replace(CONFIG, kv_backend="auto", headroom_bytes=None)
    gpu = memory_for(KVBackend.SPARSE)
    assert memory_of_all_models(auto) == gpu.usable_bytes(gpu.headroom_bytes(None))
    machine = machine_memory()
    on_cpu = memory_of_all_models(replace(auto, kv_backend="posix"))
    assert 0 < on_cpu <= machine.total_bytes - machine.headroom_bytes(None)
