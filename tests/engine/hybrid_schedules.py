"""Random schedules of engines with recurrent layers or windows: no other request changes a bit.

``python -m tests.engine.hybrid_schedules [--seeds 200] [--first 0] [--models hybrid gemma]
[--sets avx2 vnni]``

Requests of one schedule share steps, are cut into chunks, find what others have left, fork, give
way, end at a stop token, and are left by readers who have found a stop string. Each is compared
with the same request in an engine of its own in which nothing is cached: its tokens and
log-probabilities, what the model's head for drafts computes, and at the end every state that is
kept, bit by bit. The engine of its own keeps all K and V, of which a mask hides what is behind a
window, and it has no drafts.
"""

import argparse
import ctypes
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np

from engine.messages import Abort
from engine.models.checkpoint import Checkpoint
from engine.models.forward import Forward
from engine.step.draft_head import DraftHead
from engine.step.drafts import Drafts
from engine.step.loop import EngineLoop
from engine.step.row_costs import RowCosts
from engine.step.runner import ModelRunner
from engine.step.sequence import Sequence
from engine.types import FinishReason, PromptBoundaries, Request, SamplingParams, TokenEvent
from kvcache.backends.posix import NativeStates
from kvcache.block_hashes import PrefixSalt
from kvcache.groups.window import WindowGroup
from kvcache.manager import KVCacheManager
from metal_ext import CpuWorkers, instruction_sets
from tests.engine.hybrid_engines import VOCABULARY, hybrid_loop, load_hybrid
from tests.engine.models.hybrids import QWEN3_5_MOE, Steps, write_hybrid
from tests.engines import Scripted, every_third, request_of, steps
from tests.families import GEMMA3, GPT_OSS
from tests.kvcache.managers import state_group

MAX_LEN = 256
STOP_TOKENS = frozenset(range(0, VOCABULARY, 24))
DIFFERENT = "differing bits"
STATES = "states compared"
BEHIND_WINDOWS = "steps of a sequence with unmapped blocks behind a window"
COUNTED = (
    "requests",
    "steps",
    "hits",
    "preemptions",
    "forks",
    "aborts beside a step",
    "stops beside a step",
    "kept drafts",
    "rejected drafts",
)
OF_HEAD = "passes of a head compared"
"""What must have happened in any number of schedules that prove something."""
FIELDS: dict[str, dict[str, Any]] = {
    "hybrid": {"gain": 3.0, "head": "mtp"},
    "moe": {"gain": 3.0, "head": "mtp"} | QWEN3_5_MOE,
    "qwen3": {"gain": 3.0, "head": "mtp", "model_type": "qwen3"},
    "gemma": {"gain": 3.0} | GEMMA3,
    "gpt-oss": {"gain": 2.5} | GPT_OSS,
}
"""The models, and the fields of their config.json."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A small model of random weights."""

    checkpoint: Checkpoint
    model: Forward
    workers: CpuWorkers

    @property
    def has_head(self) -> bool:
        return self.checkpoint.spec.draft is not None


def a_hybrid(folder: Path, name: str = "hybrid", instruction_set: str | None = None) -> Hybrid:
    """Writes a model of FIELDS to a folder and loads it."""
    workers = CpuWorkers(1, instruction_set or instruction_sets()[0])
    checkpoint, model = load_hybrid(write_hybrid(folder, **FIELDS[name]), workers)
    assert isinstance(model, Forward)
    return Hybrid(checkpoint, model, workers)


class Heard:
    """What each request was told, how much of its prompt came from the cache, and who left."""

    def __init__(self, leaves: dict[int, int] | None = None) -> None:
        """leaves: after how many tokens the reader of a request goes: it has found a stop
        string."""
        self.said: dict[int, list[TokenEvent]] = {}
        self.cached: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.loop: EngineLoop | None = None
        self.head: NotedHead | None = None
        self._leaves = leaves or {}

    def __call__(self, events: list[TokenEvent]) -> None:
        for event in events:
            number = event.request_id
            assert event.message is None, event.message
            said = self.said.setdefault(number, [])
            said.append(event)
            if event.prefix is not None:
                self.cached[number] = event.prefix.cached_tokens
            if event.finish is FinishReason.STOP:
                self.counts["stops beside a step"] += self._in_flight(number)
            elif event.finish is None and len(said) == self._leaves.get(number):
                self.leave(number)

    def leave(self, number: int) -> None:
        """The engine is told at its next step that nobody wants a request any more."""
        assert self.loop is not None
        self.counts["aborts beside a step"] += self._in_flight(number)
        self.loop.mailbox.put(Abort(number))

    def tokens(self, number: int) -> list[int]:
        """All tokens of a request's answer."""
        events = self.said.get(number, [])
        return [event.token_id for event in events if event.token_id is not None]

    def _in_flight(self, number: int) -> bool:
        """Whether a step that has not been read computes a row of a request."""
        assert self.loop is not None
        launched = self.loop._pipeline._launched
        return any(entry.seq_id == number for its in launched for entry in its.plan.entries)


def engine(
    hybrid: Hybrid, heard: Heard, *, slots: int = 56, heaps: int = 1024, **changes: Any
) -> EngineLoop:
    """slots, heaps: what memory there is for states, and for K and V: 8 heaps hold one sequence of
    any length."""
    heard.loop = hybrid_loop(
        hybrid.checkpoint,
        hybrid.model,
        heard,
        max_len=MAX_LEN,
        room=(slots, heaps),
        kv_budget_bytes=1 << 28,
        workers=hybrid.workers,
        **changes,
    )
    return heard.loop


def asked(number: int, prompt: list[int], tokens: int, **how: Any) -> Request:
    """A request for the likeliest tokens, and what was likely beside them."""
    params = SamplingParams(tokens, temperature=0.0, logprobs=4)
    return request_of(number, tuple(prompt), params, **how)


def run(loop: EngineLoop) -> int:
    """Runs an engine until nobody is there; how many steps that took."""
    return sum(1 for _ in steps(loop))


def alone(hybrid: Hybrid, requests: list[Request]) -> Heard:
    """What each is told when it has an engine to itself, and nothing is cached."""
    heard = Heard()
    loop = engine(hybrid, heard, prefix_cache=False, windows=False)
    if hybrid.has_head:
        heard.head = NotedHead(loop)
        loop._scheduler.drafter = Deepest({}, Random(0), 0.0, heard.head)
    for request, number, params in answers_to(requests):
        constraint = deepcopy(request.constraint)
        loop.mailbox.put(
            replace(request, request_id=number, params=(params,), constraint=constraint)
        )
        run(loop)
    loop.close()
    return heard


@dataclass
class Foretold:
    """Drafts what each answer is going to be, with mistakes."""

    answers: dict[int, list[int]]
    rng: Random
    mistakes: float
    """The share of drafts that are wrong."""
    head: DraftHead | None = None
    """A head whose drafts are computed as well."""

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        return self.rng.random() < 0.5

    def depth(self, sequence: Sequence, room: int, running: int, *, idle: bool) -> int:
        return min(room, self.rng.randint(0, 6)) if idle or self.head is None else 0

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        if self.head is not None and wanted:
            self.head.propose(wanted)
        return [self._drafts(sequence, depth) for sequence, depth in wanted]

    def _drafts(self, sequence: Sequence, depth: int) -> tuple[int, ...]:
        after = self.answers[sequence.seq_id][sequence.num_generated :][:depth]
        return tuple(
            (token + 1) % VOCABULARY if self.rng.random() < self.mistakes else token
            for token in after
        )

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        assert 0 <= kept <= drafts

    def observe(self, rows: int, seconds: float, interval_s: float) -> None:
        """What steps cost does not matter."""


class NotedHead(DraftHead):
    """Notes the logits of each pass."""

    def __init__(self, loop: EngineLoop) -> None:
        runner = loop._runner
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner._model, Forward)
        super().__init__(runner._model, loop._kv, runner._workers)
        self.logits: dict[tuple[int, int, int], bytes] = {}
        """By sequence, number of its tokens, and number of the pass."""

    def _sample(self, logits: mx.array, rows: SequenceOf[Sequence], depth: int) -> mx.array:
        for row, values in zip(rows, np.array(logits), strict=True):
            self.logits[row.seq_id, row.num_tokens, depth] = values.tobytes()
        return super()._sample(logits, rows, depth)


class Deepest(Foretold):
    """Drafts nothing, but the head computes as many drafts as any other may."""

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        return True

    def depth(self, sequence: Sequence, room: int, running: int, *, idle: bool) -> int:
        return min(room, 6) if idle else 0

    def _drafts(self, sequence: Sequence, depth: int) -> tuple[int, ...]:
        return ()


# --- one schedule --------------------------------------------------------------------------------


def answers_to(requests: list[Request]) -> list[tuple[Request, int, SamplingParams]]:
    """Each answer's request, id and parameters."""
    return [
        (request, number, params)
        for request in requests
        for number, params in zip(request.answer_ids, request.params, strict=True)
    ]


def drawn(rng: Random) -> list[Request]:
    """Prompts that begin alike or go on where another one ends, and some with several answers."""
    system = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 90))]
    found: list[Request] = []
    for number in range(1, rng.randint(4, 9)):
        forks = found and rng.random() < 0.2
        if forks:
            request = found.pop()
        else:
            own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
            end = len(system) + len(own)
            ends = PromptBoundaries(len(system), end - len(own) // 2, max(0, end - 3))
            request = asked(number, system + own, 1, boundaries=ends)
        stops = STOP_TOKENS if rng.random() < 0.4 else frozenset[int]()
        params = replace(request.params[0], stop_token_ids=stops, **drawn_params(rng))
        before = request.params if forks else ()
        constraint = Scripted(every_third(VOCABULARY)) if rng.random() < 0.2 else None
        found.append(replace(request, params=(*before, params), constraint=constraint))
    return found


def drawn_params(rng: Random) -> dict[str, Any]:
    """How an answer's tokens are chosen."""
    return {
        "max_tokens": rng.randint(1, 70),
        "seed": rng.getrandbits(32),
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.2)),
        "top_p": rng.choice((1.0, 1.0, 0.9, 0.5)),
        "top_k": rng.choice((0, 0, 1, 20)),
        "min_p": rng.choice((0.0, 0.0, 0.05)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.0, 0.6)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.0, 0.3)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.0, 1.2)),
        "logit_bias": rng.choice(((), (), ((3, 2.0), (9, -100.0)))),
        "min_tokens": rng.choice((0, 0, 5)),
    }


def schedule(hybrid: Hybrid, seed: int) -> Counter[str]:
    """One schedule: what happened in it, and how many bits were different."""
    rng = Random(seed)
    requests = drawn(rng)
    numbers = [number for _, number, _ in answers_to(requests)]
    leaves = {number: rng.randint(1, 20) for number in numbers if rng.random() < 0.25}
    heard, reference = Heard(leaves), alone(hybrid, requests)
    loop = engine(
        hybrid,
        heard,
        overlap=rng.random() < 0.7,
        max_num_batched_tokens=rng.choice((5, 16, 33, 64)),
        slots=rng.choice((4, 9, 24, 24, 56)),
        heaps=rng.choice((8, 8, 9, 10, 64)),
    )
    way = rng.choice(("none", "foretold", "foretold", "head", "predicted"))
    if way == "predicted":
        requests = [predicted(request, reference, rng) for request in requests]
        loop._scheduler.drafter = Drafts(RowCosts())
    elif way != "none":
        if way == "head" and hybrid.has_head:
            heard.head = NotedHead(loop)
        answers = {number: reference.tokens(number) for number in numbers}
        mistakes = rng.choice((0.0, 0.3, 0.7))
        loop._scheduler.drafter = Foretold(answers, rng, mistakes, heard.head)
    counts = heard.counts
    for request in requests:
        loop.mailbox.put(replace(request, constraint=deepcopy(request.constraint)))
        for _ in range(rng.randint(0, 20)):
            counts["steps"] += loop.run_once()
        if rng.random() < 0.1 and not _has_ended(heard, request.request_id):
            heard.leave(request.request_id)
    for _ in steps(loop):
        counts["steps"] += 1
        counts[BEHIND_WINDOWS] += unmapped_beginnings(loop._kv)
    loop._kv.check_invariants()
    counts["schedules"] = 1
    counts["requests"] = len(numbers)
    counts["hits"] = sum(cached > 0 for cached in heard.cached.values())
    counts["preemptions"] = loop._scheduler.counters.preemptions
    counts["forks"] = len(numbers) - len(requests)
    counts["kept drafts"] = loop._scheduler.counters.accepted_tokens
    counts["rejected drafts"] = (
        loop._scheduler.counters.drafted_tokens - loop._scheduler.counters.accepted_tokens
    )
    counts[DIFFERENT] = differing_bits(heard, reference, requests)
    if heard.head is not None and reference.head is not None:
        for key in (passes := heard.head.logits).keys() & reference.head.logits:
            counts[OF_HEAD] += 1
            counts[DIFFERENT] += differing(passes[key], reference.head.logits[key])
    if hybrid.checkpoint.spec.recurrences:
        counts.update(compare_states(hybrid, heard, loop._kv, requests))
        assert loop._kv.copied_bytes == 0
    loop.close()
    return counts


def predicted(request: Request, reference: Heard, rng: Random) -> Request:
    """The request with a prediction of its first answer, in which some tokens are wrong."""
    wrong = rng.choice((0.0, 0.1))
    answer = reference.tokens(request.request_id)
    tokens = (rng.randrange(VOCABULARY) if rng.random() < wrong else token for token in answer)
    return replace(request, prediction_ids=tuple(tokens))


def unmapped_beginnings(kv: KVCacheManager) -> int:
    """The number of open sequences whose first blocks are behind a window and have no memory."""
    groups = [group for group in kv._groups if isinstance(group, WindowGroup)]
    return sum(own.table.first > 0 for group in groups for own in group._open.values())


def _has_ended(heard: Heard, number: int) -> bool:
    return any(event.finish is not None for event in heard.said.get(number, []))


def differing_bits(heard: Heard, reference: Heard, requests: list[Request]) -> int:
    """Bits of tokens, ends and log-probabilities. One whose reader went is compared as far as it
    got."""
    found = 0
    for _, number, _ in answers_to(requests):
        events = heard.said[number]
        wanted = reference.said[number]
        if events[-1].finish is FinishReason.ABORTED:
            events = events[:-1]
            wanted = wanted[: len(events)]
        found += differing(_bits(events), _bits(wanted))
    return found


def _bits(events: list[TokenEvent]) -> bytes:
    """All that a request was told."""
    parts = []
    for event in events:
        end = list(FinishReason).index(event.finish) if event.finish is not None else -1
        parts.append(struct.pack("<ii", -1 if event.token_id is None else event.token_id, end))
        if event.logprobs is not None:
            parts.append(struct.pack("<f", event.logprobs.logprob))
            parts += [struct.pack("<if", *pair) for pair in event.logprobs.top]
    return b"".join(parts)


def differing(one: bytes, other: bytes) -> int:
    """How many bits of two pieces of memory differ; all that only one of them has."""
    size = min(len(one), len(other))
    pair = (int.from_bytes(its[:size], "little") for its in (one, other))
    first, second = pair
    return (first ^ second).bit_count() + 8 * abs(len(one) - len(other))


def compare_states(
    hybrid: Hybrid, heard: Heard, kv: KVCacheManager, requests: list[Request]
) -> Counter[str]:
    """Compares the states that are kept with those of one step over all tokens before them."""
    size, held = kv._layout.tokens_per_block, {}
    for request, number, _ in answers_to(requests):
        hashes = kv.block_hashes(PrefixSalt())
        tokens = [*request.prompt_ids, *heard.tokens(number)]
        hashes.extend(tokens, 0)
        for count, digest in enumerate(hashes.digests, 1):
            held[digest] = tokens[: count * size]
    counts: Counter[str] = Counter()
    for slot in state_group(kv).pool.slots:
        if slot.digest is None:
            continue
        tokens = held[slot.digest]
        counts[STATES] += 1
        counts[DIFFERENT] += differing(states_in(kv, slot.number), fresh_states(hybrid, tokens))
    return counts


def fresh_states(hybrid: Hybrid, tokens: list[int]) -> bytes:
    """The states after these tokens, computed at once from the beginning."""
    reference = Steps(hybrid.checkpoint, hybrid.model, {1: MAX_LEN})
    reference.run([(1, 0, tokens)], None)
    newest = state_group(reference.kv)._open[1].head
    assert newest is not None
    return states_in(reference.kv, newest.number)


def states_in(kv: KVCacheManager, slot: int) -> bytes:
    """The matrices and rows of all layers in a slot."""
    memory, layout = state_group(kv)._memory, kv._layout.shape.slot
    assert isinstance(memory, NativeStates)
    assert layout is not None
    parts = zip(layout.offsets, layout.states, strict=True)
    address = memory._address(slot)
    return b"".join(ctypes.string_at(address + at, its.state_bytes) for at, its in parts)


# --- the command ---------------------------------------------------------------------------------


def line(counts: Counter[str]) -> str:
    """What happened, in one line."""
    names = "schedules", *COUNTED, OF_HEAD, STATES, BEHIND_WINDOWS, DIFFERENT
    return ", ".join(f"{counts[name]} {name}" for name in names)


def main(arguments: SequenceOf[str] | None = None) -> int:
    """Prints a line; 1 where a bit was different, or something never happened."""
    parser = argparse.ArgumentParser(prog="hybrid_schedules", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--models", nargs="+", choices=FIELDS, default=list(FIELDS))
    sets = instruction_sets()
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets[:1], help="of instructions")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    pairs = product(chosen.models, chosen.sets)
    return max([schedules_of(name, instructions, seeds) for name, instructions in pairs])


def schedules_of(name: str, instruction_set: str, seeds: SequenceOf[int]) -> int:
    """Prints a line of one model; 1 where a bit was different, or something never happened."""
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        hybrid = a_hybrid(Path(folder), name, instruction_set)
        for seed in seeds:
            found = schedule(hybrid, seed)
            if found[DIFFERENT]:
                print(f"{name}, seed {seed}: {line(found)}", flush=True)
            counts += found
    seconds = time.perf_counter() - started
    print(f"{name}, {instruction_set}: {line(counts)}; {seconds:.0f} s", flush=True)
    spec = hybrid.checkpoint.spec
    own = [STATES] * bool(spec.recurrences) + [OF_HEAD] * hybrid.has_head
    own += [BEHIND_WINDOWS] * any(each.window for each in spec.attentions)
    missing = [each for each in (*COUNTED, *own) if not counts[each]]
    if missing:
        print(f"{name}: never happened: {', '.join(missing)}")
    return 1 if missing or counts[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())
