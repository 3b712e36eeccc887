"""What one engine's death means to the next one."""

import json
import logging
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.journal import HEALTHY_S, MAX_DEATHS, Journal
from engine.types import EngineFailedError
from kvcache.backend import BackendFailedError
from kvcache.fault_memory import FaultMemory, forget_deaths
from kvcache.kv_backends import KVBackend
from kvcache.user_folders import cache_folder

SLOW = EngineFailedError("Impacting Interactivity")
HUNG = EngineFailedError("Caused GPU Timeout Error")
SHORT = EngineFailedError("Insufficient Memory")
IGNORED = EngineFailedError("Ignored (for causing prior/excessive GPU errors)")
UNMAPPED = BackendFailedError("a step met memory: Caused GPU Address Fault Error")
UNKNOWN = AssertionError("a block was lost")
ONE, TWO, THREE = (1, 2, 3), (4, 5), (6,)
CONFIG = EngineConfig()


def journal(
    kv_backend: KVBackend = KVBackend.PAGED, model: bytes = b"model", key: bytes = b"key"
) -> Journal:
    """The journal of the next process."""
    return Journal(kv_backend, model, key)


def die(error: Exception, *prompts: tuple[int, ...]) -> None:
    journal().record(error, prompts)


@pytest.mark.parametrize(
    ("deaths", "target_ms", "tokens"),
    [
        ([], 100.0, 2048),
        ([SLOW], 25.0, 2048),
        ([HUNG], 25.0, 2048),
        ([SLOW, HUNG], 6.25, 2048),
        ([SHORT], 100.0, 1024),
        ([SHORT, SHORT, SLOW], 25.0, 512),
        ([SHORT] * 12, 100.0, 1),
        ([IGNORED], 100.0, 2048),
        ([UNMAPPED], 100.0, 2048),
    ],
)
def test_the_next_start_is_gentler_by_what_has_failed(
    deaths: list[Exception], target_ms: float, tokens: int
) -> None:
    for error in deaths:
        die(error)
    config, warning = journal().gentler(CONFIG)
    assert (config.step_time_target_ms, config.max_num_batched_tokens) == (target_ms, tokens)
    assert bool(warning) == bool(deaths)
    assert (f"steps are cut to {target_ms:g} ms" in warning) == (target_ms < 100)
    assert (f"a step computes {tokens} tokens at most" in warning) == (tokens < 2048)
    assert ("AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in warning) == (target_ms < 100)
    assert "." not in warning.replace("6.25", ""), "one sentence"


@pytest.mark.parametrize("error", [SLOW, SHORT, IGNORED, UNMAPPED, UNKNOWN])
def test_what_ran_at_two_deaths_runs_alone_and_is_refused_where_it_ran_alone(
    error: Exception,
) -> None:
    trusts = []
    for others in ([TWO], [THREE], []):
        die(error, ONE, *others)
        trusts.append([journal().trust(prompt) for prompt in (ONE, TWO, THREE)])
    beside = "beside others"
    assert trusts == [[beside] * 3, ["alone", beside, beside], ["refused", beside, beside]]
    assert ("no failure of the GPU" in journal().gentler(CONFIG)[1]) == (error is UNKNOWN)


def test_a_prompt_that_is_alone_gets_a_gentler_start_before_it_is_refused() -> None:
    die(SLOW, ONE)
    assert journal().trust(ONE) == "beside others"
    die(SLOW, ONE, ONE)
    assert journal().trust(ONE) == "refused", "two answers to one prompt are one prompt"


def test_eight_that_ran_together_twice_lose_one_of_them_alone() -> None:
    prompts = [(number,) for number in range(8)]
    die(HUNG, *prompts)
    die(HUNG, *prompts)
    assert {journal().trust(prompt) for prompt in prompts} == {"alone"}
    die(HUNG, prompts[3])
    assert [journal().trust(prompt) == "refused" for prompt in prompts] == [
        number == 3 for number in range(8)
    ]


def test_a_hang_and_its_error_are_one_death() -> None:
    its = journal()
    its.record(UNKNOWN, [ONE])
    its.record(SLOW, [ONE])
    assert journal().trust(ONE) == "beside others"
    assert journal().gentler(CONFIG)[0].step_time_target_ms == 25.0


def test_no_prompt_is_written_down_and_no_digest_without_the_key() -> None:
    die(SLOW, tuple(range(100, 200)))
    journal(key=b"").record(SLOW, [ONE])
    (path,) = cache_folder().glob("deaths-*")
    first, second = json.loads(path.read_text())["deaths"]
    assert [len(digest) for digest in first["prompts"]] == [32]
    assert second["prompts"] == []
    assert path.stat().st_mode & 0o077 == 0
    assert journal(key=b"another").digest(ONE) != journal().digest(ONE)


def test_another_model_is_not_to_blame() -> None:
    die(SLOW, ONE)
    assert journal(model=b"another").gentler(CONFIG) == (CONFIG, "")


def test_on_a_cpu_nothing_is_remembered() -> None:
    its = Journal()
    its.record(UNMAPPED, [ONE])
    its.worked(2 * HEALTHY_S)
    its.end()
    assert not cache_folder().exists()


def test_deaths_are_forgotten_after_an_hour_of_work_or_by_hand() -> None:
    die(SLOW, ONE)
    for _ in range(MAX_DEATHS + 3):
        die(SLOW)
    (path,) = cache_folder().glob("deaths-*")
    assert len(json.loads(path.read_text())["deaths"]) == MAX_DEATHS
    its = journal()
    its.worked(HEALTHY_S - 1)
    assert journal().gentler(CONFIG)[1]
    its.worked(1)
    assert journal().gentler(CONFIG) == (CONFIG, "")
    die(SLOW, ONE)
    forget_deaths()
    assert journal().gentler(CONFIG) == (CONFIG, "")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"deaths": []}'])
def test_a_journal_that_cannot_be_read_is_empty(text: str) -> None:
    die(SLOW, ONE)
    (path,) = cache_folder().glob("deaths-*")
    path.write_text(text)
    assert journal().gentler(CONFIG) == (CONFIG, "")


def test_a_journal_that_cannot_be_written_costs_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quire").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        die(SLOW, ONE)
    assert "the engine's failures cannot be written down" in caplog.text


@pytest.mark.parametrize(
    ("error", "fault"),
    [(SLOW, False), (UNKNOWN, False), (UNMAPPED, True), (BackendFailedError("no answer"), True)],
)
def test_a_fault_of_the_memory_is_remembered_as_its_own(error: Exception, fault: bool) -> None:
    die(error, ONE)
    assert bool(FaultMemory(KVBackend.PAGED).found()) == fault


@pytest.mark.parametrize("kv_backend", [KVBackend.SPARSE, KVBackend.PAGED, KVBackend.METAL_DENSE])
def test_a_session_lasts_until_the_end(kv_backend: KVBackend) -> None:
    its = journal(kv_backend)
    sessions = list(cache_folder().glob("intent-*"))
    assert len(sessions) == (not kv_backend.is_dense)
    its.end()
    assert list(cache_folder().glob("intent-*")) == []
