"""The self-tests, over a device that reports mappings beside commands that may touch them."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

import metal_ext
from kvcache.backends.choice import KVBackend
from kvcache.backends.metal import MetalBackend
from kvcache.layout import KVLayout
from kvcache.selftest import kv_backend as pages
from kvcache.selftest import stress
from kvcache.selftest.kv_backend import KVBackendChecks, run_checks, small_layout
from kvcache.selftest.run import Result
from kvcache.selftest.stress import ReleaseChecks, StressChecks
from tests.metal.graph import _standin
from tests.metal.graph.stage import take_mistakes

ROUNDS = 3
ATTEMPTS = 20
MAX_TOKENS = 1024


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where MLX computes; what a process is charged for heaps is not known here."""
    mx.set_default_device(mx.Device(mx.cpu))
    monkeypatch.setattr(pages, "process_footprint", lambda: 0)
    monkeypatch.setattr(pages, "RETURNED_SHARE", 0.0)
    monkeypatch.setattr(stress, "LONG_S", 0.01)
    yield
    _standin.allow_maps_beside_commands(False)


def layout(kv_backend: KVBackend) -> KVLayout:
    return small_layout(
        kv_backend,
        pages.SHAPE,
        max_tokens=MAX_TOKENS,
        system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
        page_bytes=16384,
    )


def tried(kind: KVBackend, what: type[KVBackendChecks | ReleaseChecks]) -> list[Result]:
    its = layout(kind)
    backend = MetalBackend(
        kind.setting, its.groups[0], max_buffers=3, release_heaps=what is ReleaseChecks
    )
    return run_checks(what(backend, its).checks(), lambda _: None)


@pytest.mark.parametrize("kind", [KVBackend.SPARSE, KVBackend.PAGED])
@pytest.mark.parametrize("what", [KVBackendChecks, ReleaseChecks])
def test_a_self_test_maps_and_releases_only_while_nothing_runs(
    kind: KVBackend, what: type[KVBackendChecks | ReleaseChecks]
) -> None:
    results = tried(kind, what)
    assert all(step.passed for step in results), results[-1]


def stressed(*, allowed: bool) -> list[str]:
    """What is reported of a stress test."""
    _standin.allow_maps_beside_commands(allowed)
    its = layout(KVBackend.SPARSE)
    backend = MetalBackend(
        "sparse", its.groups[0], max_buffers=3, release_heaps=False, maps_while_running=True
    )
    results = run_checks(StressChecks(backend, its, ROUNDS).checks(), lambda _: None)
    assert all(step.passed for step in results), results[-1]
    return [said for said in take_mistakes() if "a command in flight may touch" in said]


def test_the_stress_test_does_what_is_reported_otherwise() -> None:
    assert not stressed(allowed=True)
    # On a busy machine commands may end before the mapper's thread begins.
    assert any(stressed(allowed=False) for _ in range(ATTEMPTS))
