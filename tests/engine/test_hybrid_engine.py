"""An engine with a model of attention and recurrent layers: nobody's company changes a bit."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from engine.build import plan_engine
from engine.loop import EngineLoop
from engine.models.checkpoint import Checkpoint
from engine.runner import Model
from engine.types import Request, SamplingParams, TokenEvent, Turns
from kvcache import memory_budget, native_states
from kvcache.choice import SubstrateChoice
from kvcache.layout import LayoutError
from kvcache.substrates import Substrate
from tests.engine.hybrid_engines import VOCABULARY, hybrid_loop, load_hybrid
from tests.engine.models.hybrids import write_hybrid
from tests.engines import CONFIG, MACHINE, steps

Said = list[tuple[int | None, Any]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Model]:
    return load_hybrid(write_hybrid(tmp_path_factory.mktemp("hybrid"), gain=3.0))


class Heard:
    """What each request was told, and how much of its prompt came from the cache."""

    def __init__(self) -> None:
        self.said: dict[int, Said] = {}
        self.cached: dict[int, int] = {}

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.message is None, event.message
            self.said.setdefault(event.request_id, []).append((event.token_id, event.logprobs))
            if event.prefix is not None:
                self.cached[event.request_id] = event.prefix.cached_tokens


def engine(hybrid: tuple[Checkpoint, Model], heard: Heard, **changes: Any) -> EngineLoop:
    return hybrid_loop(*hybrid, heard, **changes)


def asked(number: int, prompt: list[int], tokens: int, **how: Any) -> Request:
    params = SamplingParams(tokens, temperature=0.0, logprobs=1)
    return Request(number, tuple(prompt), params, **how)


def run(loop: EngineLoop) -> None:
    for _ in steps(loop):
        pass


def alone(hybrid: tuple[Checkpoint, Model], requests: list[Request]) -> dict[int, Said]:
    """What each is told when it has an engine to itself, and nothing is cached."""
    heard = Heard()
    loop = engine(hybrid, heard, prefix_cache=False)
    for request in requests:
        loop.mailbox.put(replace(request, fork_of=None))
        run(loop)
    loop.close()
    return heard.said


def drawn(rng: Random) -> list[Request]:
    """Prompts that begin alike, and some that fork."""
    system = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 90))]
    found: list[Request] = []
    for number in range(1, rng.randint(4, 9)):
        if found and rng.random() < 0.2:
            parent = rng.choice(found)
            how: dict[str, Any] = {"fork_of": parent.request_id}
            found.append(asked(number, [*parent.prompt_ids], rng.randint(1, 20), **how))
            continue
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
        end = len(system) + len(own)
        how = {"system_tokens": len(system), "turns": Turns(end - len(own) // 2, max(0, end - 3))}
        found.append(asked(number, system + own, rng.randint(1, 40), **how))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_no_company_chunk_hit_fork_or_preemption_changes_a_bit(
    seed: int, hybrid: tuple[Checkpoint, Model]
) -> None:
    rng, heard = Random(seed), Heard()
    requests = drawn(rng)
    loop = engine(
        hybrid,
        heard,
        overlap=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice((5, 16, 33, 64)),
        kv_budget_bytes=rng.choice((1200, 2048, 65536)) << 10,
    )
    for request in requests:
        loop.mailbox.put(request)
        for _ in range(rng.randint(0, 30)):
            loop.run_once()
    run(loop)
    assert heard.said == alone(hybrid, requests)
    assert loop.stats.copied_bytes == 0, "forks find their parent's states"
    loop.close()


def test_a_preempted_sequence_goes_on_from_its_last_boundary(
    hybrid: tuple[Checkpoint, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, heard = Random(3), Heard()
    with monkeypatch.context() as patch:
        patch.setattr(memory_budget, "STATE_SHARE", 0.7)  # K and V run short before cells do
        loop = engine(hybrid, heard, overlap=True, kv_budget_bytes=3 << 20)
    requests = [
        asked(number, [rng.randrange(VOCABULARY) for _ in range(60)], 120) for number in range(1, 6)
    ]
    for request in requests:
        loop.mailbox.put(request)
    run(loop)
    assert loop._scheduler.counters.preemptions
    assert heard.said == alone(hybrid, requests)
    loop.close()


def test_a_conversation_computes_what_is_new_and_copies_nothing(
    hybrid: tuple[Checkpoint, Model],
) -> None:
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
        tokens += [token for token, _ in heard.said[turn] if token is not None]
        tokens += [rng.randrange(VOCABULARY) for _ in range(8)]
    assert loop._kv.copied_bytes == 0
    loop.close()


def test_a_gpu_refuses_heads_that_its_kernels_do_not_know(
    hybrid: tuple[Checkpoint, Model],
) -> None:
    choice = SubstrateChoice(Substrate.SPARSE, ("as the test wants it",))
    with pytest.raises(LayoutError, match=r"heads of 32 dimensions, .* know 128: .* posix"):
        plan_engine(CONFIG, hybrid[0], MACHINE, choice)


def test_states_that_were_evicted_give_their_memory_back_and_are_computed_again(
    hybrid: tuple[Checkpoint, Model],
) -> None:
    heard = Heard()
    loop = engine(hybrid, heard, overlap=True)
    for number in (1, 2):
        loop.mailbox.put(asked(number, [5] * 70, 12))
        run(loop)
        assert loop._kv._states is not None
        while loop._kv._states.pool.evict():
            pass
        loop._kv.release_idle_memory()
    assert heard.said[1] == heard.said[2]
    assert heard.cached == {1: 0, 2: 0}
    loop.close()


def test_what_nobody_uses_for_a_while_goes_back_with_its_states(
    hybrid: tuple[Checkpoint, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_states, "MEASURED_EVERY_S", 0.0)
    heard = Heard()
    loop = engine(hybrid, heard, overlap=True, prefix_keep_s=0.0, idle_release_s=0.0)
    loop.mailbox.put(asked(1, [5] * 70, 40))
    run(loop)
    kv = loop._kv.stats()
    assert kv.cells.committed_bytes > 0
    for _ in range(1000):
        loop.run_once()
        kv = loop._kv.stats()
        if kv.free_bytes == kv.capacity_bytes and not kv.cells.committed_bytes:
            break
    assert (kv.cells.free, kv.cells.evicted > 0) == (kv.cells.cells, True)
    assert kv.committed_bytes <= CONFIG.heap_bytes
    loop.close()
