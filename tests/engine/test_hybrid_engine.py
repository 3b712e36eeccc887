"""An engine with a model of attention and recurrent layers: nobody's company changes a bit."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from engine.build import plan_engine
from kvcache.backends import posix
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.layout import LayoutError
from tests.engine.hybrid_engines import VOCABULARY
from tests.engine.hybrid_schedules import (
    BEHIND_WINDOWS,
    DIFFERENT,
    Heard,
    Hybrid,
    a_hybrid,
    asked,
    engine,
    line,
    run,
    schedule,
)
from tests.engines import CONFIG, MACHINE
from tests.kvcache.managers import state_group


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return a_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("seed", range(8))
def test_no_company_chunk_hit_fork_abort_or_preemption_changes_a_bit(
    seed: int, hybrid: Hybrid
) -> None:
    counts = schedule(hybrid, seed)
    assert counts[DIFFERENT] == 0, line(counts)


def test_a_conversation_computes_what_is_new_and_copies_nothing(hybrid: Hybrid) -> None:
    rng, heard = Random(7), Heard()
    loop = engine(hybrid, heard, overlap=True)
    size = loop._kv._layout.tokens_per_block
    tokens = [rng.randrange(VOCABULARY) for _ in range(70)]
    for turn in range(1, 6):
        known = len(tokens)
        loop.mailbox.put(asked(turn, tokens, 12))
        run(loop)
        if turn > 1:
            assert heard.cached[turn] > known - 9 - size, "what is new, and less than a block"
        tokens += heard.tokens(turn)
        tokens += [rng.randrange(VOCABULARY) for _ in range(8)]
    assert loop._kv.copied_bytes == 0
    loop.close()


@pytest.mark.parametrize("name", ["gemma", "gpt-oss"])
def test_memory_that_is_gone_behind_a_window_changes_no_bit(name: str, tmp_path: Path) -> None:
    model, counts = a_hybrid(tmp_path, name), Counter[str]()
    for seed in range(5):
        counts += schedule(model, seed)
    assert counts[DIFFERENT] == 0, line(counts)
    assert counts[BEHIND_WINDOWS] > 100


@pytest.mark.parametrize("name", ["gemma", "gpt-oss"])
def test_twenty_turns_behind_a_window_compute_what_is_new_and_one_block(
    name: str, tmp_path: Path
) -> None:
    rng, heard = Random(7), Heard()
    loop = engine(a_hybrid(tmp_path, name), heard, overlap=True)
    tokens, new = [rng.randrange(VOCABULARY) for _ in range(90)], 90
    for turn in range(1, 21):
        loop.mailbox.put(asked(turn, tokens, 4))
        run(loop)
        assert len(tokens) - heard.cached[turn] <= new + loop._kv._layout.tokens_per_block
        tokens += heard.tokens(turn)
        tokens += [rng.randrange(VOCABULARY) for _ in range(3)]
        new = 4  # with an answer's last token, which no step has computed
    loop.close()


def test_a_gpu_refuses_heads_that_its_kernels_do_not_know(hybrid: Hybrid) -> None:
    choice = KVBackendChoice(KVBackend.SPARSE, ("as the test wants it",))
    with pytest.raises(LayoutError, match=r"heads of 32 dimensions, .* know 128: .* posix"):
        plan_engine(CONFIG, hybrid.checkpoint, MACHINE, choice)


def test_states_that_were_evicted_give_their_memory_back_and_are_computed_again(
    hybrid: Hybrid,
) -> None:
    heard = Heard()
    loop = engine(hybrid, heard, overlap=True)
    for number in (1, 2):
        loop.mailbox.put(asked(number, [5] * 70, 12))
        run(loop)
        while state_group(loop._kv).pool.evict():
            pass
        loop._kv.release_idle_memory()
    assert heard.tokens(1) == heard.tokens(2)
    assert heard.cached == {1: 0, 2: 0}
    loop.close()


def test_what_nobody_uses_for_a_while_goes_back_with_its_states(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "MEASURED_EVERY_S", 0.0)
    heard = Heard()
    loop = engine(hybrid, heard, overlap=True, prefix_keep_s=0.0, idle_release_s=0.0)
    loop.mailbox.put(asked(1, [5] * 70, 40))
    run(loop)
    kv = loop._kv.stats()
    assert kv.slots.committed_bytes > 0
    for _ in range(1000):
        loop.run_once()
        kv = loop._kv.stats()
        if kv.free_bytes == kv.capacity_bytes and not kv.slots.committed_bytes:
            break
    assert (kv.slots.free, kv.slots.evicted > 0) == (kv.slots.slots, True)
    assert kv.committed_bytes <= CONFIG.heap_bytes
    loop.close()
