"""The choice of a backend: the configured one, or the first of the GPU's that works, or the
CPU's."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcache.backends.choice import KVBackend, KVBackendError, MetalDevice, choose_kv_backend

NOWHERE = "this machine has no Metal device"


def broken(*kv_backends: KVBackend) -> Callable[[KVBackend], str]:
    """A trial that these do not pass."""
    return lambda kv_backend: f"{kv_backend.name} is broken" if kv_backend in kv_backends else ""


def nothing(_: KVBackend) -> tuple[str, ...]:
    """No backend has failed here."""
    return ()


def once(kv_backend: KVBackend) -> tuple[str, ...]:
    """The sparse one has."""
    return ("it hung",) if kv_backend is KVBackend.SPARSE else ()


def never(kv_backend: KVBackend) -> str:
    raise AssertionError(f"{kv_backend} is tried")


@pytest.mark.parametrize(
    ("faults", "chosen"),
    [
        ((), KVBackend.SPARSE),
        ((KVBackend.SPARSE,), KVBackend.PAGED),
        ((KVBackend.SPARSE, KVBackend.PAGED), KVBackend.METAL_DENSE),
        ((KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE), KVBackend.POSIX),
    ],
)
def test_the_first_one_that_passes_serves_and_the_others_are_explained(
    faults: tuple[KVBackend, ...], chosen: KVBackend
) -> None:
    choice = choose_kv_backend("auto", no_metal="", trial=broken(*faults), remembered=nothing)
    assert choice.kv_backend is chosen
    assert len(choice.reasons) == len(faults) + 1
    for fault, reason in zip(faults, choice.reasons, strict=False):
        assert reason == f"not {fault}: {fault.name} is broken"
    assert choice.reasons[-1].startswith(f"{chosen}: ")


def test_only_the_cpu_beside_a_gpu_is_worth_a_warning() -> None:
    every = broken(KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE)
    choice = choose_kv_backend("auto", no_metal="", trial=every, remembered=nothing)
    assert choice.warnings == choice.reasons[-1:]
    assert "its CPU is many times slower" in choice.warnings[0]
    one = choose_kv_backend("auto", no_metal="", trial=broken(KVBackend.SPARSE), remembered=nothing)
    assert one.warnings == ()
    assert choose_kv_backend("auto", no_metal=NOWHERE, trial=never, remembered=once).warnings == ()


def test_what_has_failed_here_before_is_refused_to_who_asks_for_it() -> None:
    with pytest.raises(KVBackendError) as caught:
        choose_kv_backend("sparse", no_metal="", trial=never, remembered=once)
    for words in ("it hung", "`quire doctor --stress`", "--kv-backend auto"):
        assert words in str(caught.value)
    taken = choose_kv_backend("paged", no_metal="", trial=broken(), remembered=once)
    assert taken.kv_backend is KVBackend.PAGED


@pytest.mark.parametrize(
    ("asked", "no_metal", "chosen"),
    [
        ("posix", "", KVBackend.POSIX),
        ("posix", NOWHERE, KVBackend.POSIX),
        ("dense", "", KVBackend.METAL_DENSE),
        ("sparse", "", KVBackend.SPARSE),
        ("paged", "", KVBackend.PAGED),
    ],
)
def test_what_is_asked_for_serves_on_the_gpu_where_there_is_one(
    asked: str, no_metal: str, chosen: KVBackend
) -> None:
    trial = broken() if chosen.on_gpu else never
    choice = choose_kv_backend(asked, no_metal=no_metal, trial=trial, remembered=nothing)
    assert choice.kv_backend is chosen
    assert choice.reasons == (f"{chosen}: as configured",)


@pytest.mark.parametrize(
    ("asked", "no_metal", "message"),
    [
        ("dense", NOWHERE, "dense is memory of a GPU: this machine has no Metal device"),
        ("sparse", NOWHERE, "sparse is memory of a GPU: this machine has no Metal device"),
        ("sparse", "", "sparse on Metal does not work on this machine: SPARSE is broken"),
        ("dense", "", "dense on Metal does not work on this machine: METAL_DENSE is broken"),
        ("papyrus", "", "no backend 'papyrus'; there are auto, sparse, paged, dense, posix"),
    ],
)
def test_what_this_machine_lacks_is_refused_by_name(
    asked: str, no_metal: str, message: str
) -> None:
    trial = broken(KVBackend.SPARSE, KVBackend.METAL_DENSE)
    with pytest.raises(KVBackendError) as caught:
        choose_kv_backend(asked, no_metal=no_metal, trial=trial, remembered=nothing)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


SAID: dict[str, Any] = {
    "name": "Apple M3 Pro",
    "families": ["apple9"],
    "recommended_working_set_bytes": 12 << 30,
    "max_buffer_bytes": 9 << 30,
    "missing_for_sparse": ["the device makes no Metal 4 command queue"],
    "missing_for_paged": [],
    "missing_for_dense": [],
}


def test_a_device_is_what_it_says() -> None:
    device = MetalDevice.of(SAID)
    assert device.name == "Apple M3 Pro"
    assert (device.working_set_bytes, device.max_buffer_bytes) == (12 << 30, 9 << 30)
    lacks = ("the device makes no Metal 4 command queue",)
    assert device.missing == {"sparse": lacks, "paged": (), "dense": ()}
    assert device.said is SAID
