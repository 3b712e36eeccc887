"""A plan is a value: what an engine has planned, another process runs again."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from engine.step.plan import Closed, Forked, Opened, PendingToken
from engine.types import SamplingParams, TokenEvent
from tests.engine import replay
from tests.engine.hybrid_schedules import Foretold
from tests.engine.replay import Begun, Event, Record, RecordingRunner, Submitted, Tokens, built
from tests.engines import CONFIG, Scripted, request_of, run_dry

PAGE_BYTES = 4096
PROMPT = tuple(range(3, 90))
# Of two layers' keys and values.
BLOCK_BYTES = 4 * PAGE_BYTES
# Fewer blocks than five sequences need at their ends.
KV_BUDGET_BYTES = 12 * BLOCK_BYTES
SEEDED = SamplingParams(24, temperature=0.9, seed=11, top_p=0.9)
GREEDY = SamplingParams(40, temperature=0.0)
PENALISED = SamplingParams(
    30, temperature=1.0, seed=5, presence_penalty=0.5, repetition_penalty=1.2
)


def recorded(folder: Path, answers: Tokens | None = None) -> tuple[Record, Tokens]:
    """An engine's record, and what it told its clients: alone and together, with hits, forks,
    preemptions, a grammar, penalties and seeds. answers: from which drafts are taken."""
    config = replace(
        CONFIG,
        page_bytes=PAGE_BYTES,
        heap_bytes=4 * BLOCK_BYTES,
        kv_budget_bytes=KV_BUDGET_BYTES,
        max_model_len=200,
        prefix_keep_s=1e9,
        idle_release_s=1e9,
        overlap=True,
    )
    record, events = Record(folder, config), list[TokenEvent]()
    loop = built(record, events.extend)
    RecordingRunner(loop, record)
    loop._scheduler.drafter = Foretold(answers, Random(0), 0.3) if answers else None
    ruled = Scripted(lambda accepted: {7, 8, 9} if len(accepted) % 2 else set(range(20, 40)))
    for crowd in (
        [request_of(1, PROMPT, SEEDED)],
        [request_of(2, (*PROMPT, 5), GREEDY, SEEDED)],
        [request_of(n, (n, *PROMPT[: 5 * n]), GREEDY) for n in range(4, 9)],
        [request_of(9, PROMPT, PENALISED), request_of(10, PROMPT[:30], GREEDY, constraint=ruled)],
        [request_of(11, (*PROMPT, 6), replace(GREEDY, max_tokens=5))],
    ):
        for request in crowd:
            loop.mailbox.put(request)
        run_dry(loop)
    told: Tokens = {}
    for event in events:
        assert event.message is None
        if event.token_id is not None:
            told.setdefault(event.request_id, []).append(event.token_id)
    loop.close()
    return record, told


def is_of(event: Event, request_id: int) -> bool:
    """Whether it begins a step of this request."""
    return isinstance(event, Begun) and event.plan.entries[0].seq_id == request_id


def with_seed(event: Event, seed: int) -> Event:
    """The same with another seed wherever a token is sampled."""
    if not isinstance(event, Begun):
        return event
    entries = []
    for entry in event.plan.entries:
        if entry.sampling is not None:
            params = replace(entry.sampling.params, seed=seed)
            entry = entry._replace(sampling=entry.sampling._replace(params=params))
        entries.append(entry)
    return replace(event, plan=replace(event.plan, entries=tuple(entries)))


def test_recorded_plans_give_the_same_tokens_in_a_fresh_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    # The five that run out of memory together have no drafts.
    answers = {n: [] if 4 <= n < 9 else tokens for n, tokens in recorded(tiny_model)[1].items()}
    record, told = recorded(tiny_model, answers)
    plans = [event for event in record.events if isinstance(event, Begun)]
    decisions = Counter(type(one) for begun in plans for one in begun.plan.decisions)
    entries = [entry for begun in plans for entry in begun.plan.entries]
    # All that a plan can say is in it.
    assert {Opened, Forked, Closed} <= decisions.keys()
    assert any(isinstance(d, Closed) and d.preempted for b in plans for d in b.plan.decisions)
    assert any(entry.start and not isinstance(entry.tokens, PendingToken) for entry in entries)
    assert any(isinstance(entry.tokens, PendingToken) for entry in entries)
    assert any(begun.overlapped for begun in plans)
    assert any(entry.drafts for entry in entries)
    states = [e.state for e in record.events if isinstance(e, Submitted) and e.state is not None]
    assert any(state.masks is not None for state in states)
    assert any(history is not None for state in states for history in state.histories)
    assert any(begun.overlapped and begun.plan.needs_state for begun in plans)
    assert sum(map(len, told.values())) == 24 + 40 + 24 + 5 * 40 + 30 + 40 + 5
    file = tmp_path / "record"
    file.write_bytes(pickle.dumps(record))
    program = "import sys; from tests.engine.replay import main; main(sys.argv[1])"
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {int(number): tokens for number, tokens in json.loads(done.stdout).items()} == told


def test_a_plan_that_says_something_else_gives_other_tokens(tiny_model: Path) -> None:
    record, told = recorded(tiny_model)
    first = record.events[: next(n for n, event in enumerate(record.events) if is_of(event, 2))]
    other = [with_seed(event, SEEDED.seed + 1) for event in first]
    assert replay.Replay(record).run(other)[1] != told[1]
