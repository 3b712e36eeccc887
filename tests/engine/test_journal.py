"""What one engine's death means to the next one."""

import json

import pytest

from engine.config import EngineConfig
from engine.journal import HEALTHY_S, MAX_DEATHS, Journal
from engine.step.loop import EngineLoop
from engine.types import EngineFailedError
from kvcache.backends.backend import BackendFailedError
from kvcache.backends.choice import KVBackend
from kvcache.backends.faults import forget_deaths
from kvcache.user_folders import cache_folder
from tests.engines import Answers, recall_loop

SLOW = EngineFailedError("Impacting Interactivity")
HUNG = EngineFailedError("Caused GPU Timeout Error")
SHORT = EngineFailedError("Insufficient Memory")
UNMAPPED = BackendFailedError("a step met memory: Caused GPU Address Fault Error")
UNKNOWN = AssertionError("a block was lost")
EIGHT = [(number,) for number in range(8)]
ONE, TWO, THREE = EIGHT[:3]
CONFIG = EngineConfig()


def journal(kv_backend: KVBackend = KVBackend.PAGED, key: bytes = b"key") -> Journal:
    """The journal of the next process."""
    return Journal(kv_backend, b"model", key)


def die(error: Exception, *prompts: tuple[int, ...]) -> None:
    journal().record(error, prompts)


@pytest.mark.parametrize(
    ("deaths", "target_ms", "tokens"),
    [
        ([SLOW], 25.0, 2048),
        ([SLOW, HUNG], 6.25, 2048),
        ([SHORT, SHORT, SLOW], 25.0, 512),
        ([SHORT] * 12, 100.0, 1),
        ([UNMAPPED], 100.0, 2048),
        ([UNKNOWN], 100.0, 2048),
    ],
)
def test_the_next_start_is_gentler_by_what_has_failed(
    deaths: list[Exception], target_ms: float, tokens: int
) -> None:
    for error in deaths:
        die(error, ONE)
    config, warning = journal().gentler(CONFIG)
    assert (config.step_time_target_ms, config.max_num_batched_tokens) == (target_ms, tokens)
    assert f"steps are cut to {target_ms:g} ms and {tokens} tokens" in warning
    assert ("AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1" in warning) == (target_ms < 100)
    assert ("no failure of the GPU" in warning) == (deaths == [UNKNOWN])
    assert Journal(KVBackend.PAGED, b"another").gentler(CONFIG) == (CONFIG, "")


@pytest.mark.parametrize("error", [SLOW, UNKNOWN])
@pytest.mark.parametrize(
    ("deaths", "suspects"),
    [
        ([[ONE]], {}),
        ([[ONE, TWO]], {}),
        ([[ONE, TWO], [ONE, THREE]], {ONE: "alone"}),
        ([[ONE, TWO], [ONE, THREE], [ONE]], {ONE: "refused"}),
        ([[ONE], [ONE, ONE]], {ONE: "refused"}),
        ([EIGHT, EIGHT], dict.fromkeys(EIGHT, "alone")),
        ([EIGHT, EIGHT, [TWO]], dict.fromkeys(EIGHT, "alone") | {TWO: "refused"}),
    ],
)
def test_what_ran_at_two_deaths_runs_alone_and_is_refused_where_it_ran_alone(
    deaths: list[list[tuple[int]]], suspects: dict[tuple[int], str], error: Exception
) -> None:
    for prompts in deaths:
        die(error, *prompts)
    trusts = {prompt: journal().trust(prompt) for prompt in EIGHT}
    assert trusts == dict.fromkeys(EIGHT, "beside others") | suspects


def test_a_hang_and_its_error_are_one_death() -> None:
    dying = journal()
    dying.record(UNKNOWN, [ONE])
    dying.record(SLOW, [ONE])
    assert journal().trust(ONE) == "beside others"
    assert journal().gentler(CONFIG)[0].step_time_target_ms == 25.0


def test_no_prompt_is_written_down_and_no_digest_without_the_key() -> None:
    journal(key=b"").record(UNKNOWN, [ONE])
    assert not cache_folder().exists(), "there is nothing to tell"
    die(SLOW, tuple(range(100, 200)))
    journal(key=b"").record(SLOW, [ONE])
    (path,) = cache_folder().glob("deaths-*")
    (_, (digest,)), (_, without_key) = json.loads(path.read_text())["deaths"]
    assert (len(digest), without_key) == (32, [])
    assert path.stat().st_mode & 0o077 == 0
    assert journal(key=b"another").digest(ONE) != journal().digest(ONE)


def test_deaths_are_forgotten_after_an_hour_of_work_or_by_hand() -> None:
    for _ in range(MAX_DEATHS + 3):
        die(SLOW, ONE)
    (path,) = cache_folder().glob("deaths-*")
    assert len(json.loads(path.read_text())["deaths"]) == MAX_DEATHS
    working = journal()
    working.worked(HEALTHY_S - 1)
    assert journal().gentler(CONFIG)[1]
    working.worked(1)
    assert journal().gentler(CONFIG) == (CONFIG, "")
    die(SLOW, ONE)
    forget_deaths()
    assert journal().gentler(CONFIG) == (CONFIG, "")


DEATHS = ["3", '["TIMEOUT"]', '[["TIMEOUT", 3]]', '[{"failure": ""}]', '[["UNHEARD_OF", [3]]]']


@pytest.mark.parametrize("text", ["", "[]", "{}", *(f'{{"deaths": {text}}}' for text in DEATHS)])
def test_a_damaged_journal_changes_nothing(text: str) -> None:
    die(SLOW, ONE)
    (path,) = cache_folder().glob("deaths-*")
    path.write_text(text)
    assert journal().gentler(CONFIG)[0] == CONFIG
    assert journal().trust(ONE) == "beside others"


def test_a_journal_that_cannot_be_written_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file")
    die(SLOW, ONE)
    assert "the engine's failures cannot be written down" in caplog.text


@pytest.mark.parametrize("kv_backend", KVBackend)
def test_an_engine_that_maps_on_a_gpu_has_a_session_until_it_ends(kv_backend: KVBackend) -> None:
    loop = recall_loop(Answers.empty())
    parts = (loop._scheduler, loop._kv, loop._runner)
    loop = EngineLoop(*parts, CONFIG, emit=print, journal=journal(kv_backend))
    sessions = list(cache_folder().glob("intent-*"))
    assert len(sessions) == (kv_backend in (KVBackend.SPARSE, KVBackend.PAGED))
    loop.close()
    assert list(cache_folder().glob("intent-*")) == []
