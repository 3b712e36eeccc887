"""One engine of a cluster, as the front asks it: what goes in and out is sent between machines."""

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from engine.client import EngineClient, TokenStream
from engine.errors import FORM_LIMITS, EngineDeadError, QueueFullError
from engine.types import EngineStats, FinishReason, Submission, TokenConstraint, TokenEvent
from server.chat.readiness import generates
from server.cluster.messages import Numbered, Refusal, ReplicaReport
from server.cluster.replica_loads import Load
from server.cluster.scaling import Need, need_of
from server.cluster.sent_forms import SentForm
from server.text.grammar.compiler import GrammarMemoryError
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.judge import JudgeBusyError

# Fewer tokens of prompts say little: a machine that does something else meanwhile is not slow.
LEAST_TOKENS = 1024
# So many tokens back an engine's past counts half.
HALVED_TOKENS = 32_768


class PromptSpeed:
    """Tokens of prompts per second of the time that steps spend on prompts, whatever answers run
    beside them."""

    def __init__(self) -> None:
        self._since = EngineStats()
        self._tokens = 0.0
        self._seconds = 0.0

    def of(self, stats: EngineStats) -> float:
        """Return the speed, with what has happened since the last call; 0 while little is known."""
        since, self._since = self._since, stats
        self._tokens += stats.timed_prompt_tokens - since.timed_prompt_tokens
        self._seconds += stats.timed_prompt_seconds - since.timed_prompt_seconds
        if self._tokens > HALVED_TOKENS:
            self._tokens, self._seconds = self._tokens / 2, self._seconds / 2
        known = self._tokens >= LEAST_TOKENS and self._seconds > 0
        return self._tokens / self._seconds if known else 0.0


# Who asks hears from an answer this often, whether there is a token or not.
SIGN_OF_LIFE_S = 1.0
# Evicted hashes of so many reports, and so many in all, stand in each: one may be lost on its way.
REPORTS_REPEATED = 3
MAX_REPORTED_HASHES = 4096

Report = dict[str, object]
"""What a replica reports to whoever chooses replicas: ``load`` is a Load, and ``evicted`` a list of
pairs, a number that rises and a hash. Of a model with recurrent layers ``states`` is a number that
rises and the hashes of all prefixes after which a state is kept."""


class Grammars(Protocol):
    """Compiles what answers are held to, as GrammarCompiler does."""

    async def compile(self, spec: ConstraintSpec, begun: str = "") -> TokenConstraint | None:
        """Return the constraint of an answer."""


class EngineReplica:
    """An engine that answers what is sent to it. All methods run on the event loop."""

    def __init__(
        self, name: str, host: str, client: EngineClient, grammars: Grammars, ready_timeout_s: float
    ) -> None:
        """name: which no other replica has had. host: the name of the machine. ready_timeout_s: how
        long a token may take when the engine is asked whether it still generates."""
        self._name = name
        self._host = host
        self._client = client
        self._grammars = grammars
        self._ready_timeout_s = ready_timeout_s
        self._speed = PromptSpeed()
        self._reported: deque[tuple[int, list[bytes]]] = deque(maxlen=REPORTS_REPEATED)
        """The newest evictions, by the number of the first hash."""
        self._evicted = 0
        """How many hashes were reported."""
        self._state_reports = 0

    async def generate(
        self, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        """Answer a prompt: yield the events of its answers, and an empty list at the beginning and
        whenever a second passes without one. Leaving early aborts it."""
        yield []
        try:
            streams = await self._submit(submission)
        except (QueueFullError, JudgeBusyError, GrammarMemoryError):
            yield Refusal.FULL
            return
        except EngineDeadError:
            yield Refusal.ENDED
            return
        except GrammarError as error:
            # The front has compiled it: this machine took longer, or has less room for it.
            yield _failed(submission, f"{FORM_LIMITS}: {error}")
            return
        running = dict(enumerate(streams))
        try:
            while running:
                batches = await TokenStream.next_batches([*running.values()], SIGN_OF_LIFE_S)
                events = [
                    (number, event)
                    for number, batch in zip(list(running), batches, strict=True)
                    for event in batch
                ]
                for number, event in events:
                    if event.finish is not None:
                        del running[number]
                yield events
        finally:
            for stream in streams:
                stream.close()

    async def _submit(self, submission: Submission) -> list[TokenStream]:
        if (sent := submission.constraint) is not None:
            assert isinstance(sent, SentForm)
            constraint = await self._grammars.compile(sent.spec, sent.begun)
            submission = replace(submission, constraint=constraint)
        return self._client.submit_choices(submission)

    def report(self) -> ReplicaReport:
        """Say how it is."""
        client = self._client
        return ReplicaReport(
            self._name,
            self._host,
            client.limits,
            client.stats,
            client.capacity,
            client.step_age_s,
            client.pressure,
        )

    async def routing_report(self) -> Report:
        """Say what whoever chooses replicas wants to know. Raises EngineDeadError."""
        news = await self._client.take_prefix_news()
        if evicted := news.evicted:
            newest = evicted[-MAX_REPORTED_HASHES:]
            self._reported.append((self._evicted, newest))
            self._evicted += len(newest)
        pairs = [
            (first + place, digest)
            for first, digests in self._reported
            for place, digest in enumerate(digests)
        ]
        report: Report = {"load": self._load(), "evicted": pairs[-MAX_REPORTED_HASHES:]}
        if news.states is not None:
            self._state_reports += 1
            report["states"] = self._state_reports, news.states
        return report

    def need(self) -> Need:
        """Say what decides how many replicas there are."""
        return need_of(self._client.stats, self._client.limits.max_num_seqs)

    def _load(self) -> Load:
        stats = self._client.stats
        free = total = 0
        if (kv := stats.kv) is not None:
            free, total = kv.free_bytes // kv.block_bytes, kv.capacity_bytes // kv.block_bytes
        return Load(stats.waiting, stats.running, free, total, self._speed.of(stats))

    async def generates(self) -> bool:
        """Return whether its engine generates a token, ahead of all others."""
        return self._client.alive and await generates(self._client, self._ready_timeout_s)


def _failed(submission: Submission, message: str) -> list[Numbered]:
    event = TokenEvent(0, None, FinishReason.ERROR, message=message)
    return [(number, event) for number in range(len(submission.params))]
