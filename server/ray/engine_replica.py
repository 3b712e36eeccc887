"""One engine of a cluster, as the front asks it: what goes in and out is sent between machines."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from engine.client import EngineClient, TokenStream
from engine.errors import FORM_LIMITS, EngineDeadError, QueueFullError
from engine.types import FinishReason, Submission, TokenConstraint, TokenEvent
from server.chat.readiness import generates
from server.ray.messages import Numbered, Refusal, ReplicaReport, SentForm
from server.text.grammar.compiler import GrammarMemoryError
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.judge import JudgeBusyError

# Who asks hears from an answer this often, whether there is a token or not.
SIGN_OF_LIFE_S = 1.0


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

    async def generates(self) -> bool:
        """Return whether its engine generates a token, ahead of all others."""
        return self._client.alive and await generates(self._client, self._ready_timeout_s)


def _failed(submission: Submission, message: str) -> list[Numbered]:
    event = TokenEvent(0, None, FinishReason.ERROR, message=message)
    return [(number, event) for number in range(len(submission.params))]
