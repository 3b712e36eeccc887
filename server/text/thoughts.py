"""What models thought before they answered, for clients that do not send it back.

Some templates keep earlier thoughts: those since the last question, or all. Where a client leaves
them out, the model is shown less than it knew, and the prompt leaves what is in the cache at its
first answer. So the thoughts of the newest answers are kept, and put back into their turns.

An answer with calls is found by the id of the first one, which is random. One without is found by
its text and all that was said before it: short answers are alike. Both are found only by whom they
were made for.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.types import PrefixSalt
from server.conversation import Conversation, Turn
from server.text.newest import Newest
from server.text.pieces import AnswerPiece, Channel, TextPiece, ToolCallStart

LENGTH_BYTES = 8


class ThoughtRecord:
    """Gathers one answer while it is read."""

    def __init__(self, key_of: "KeyOfAnswer", keep: Callable[[bytes, str], None]) -> None:
        """keep: is given the key of the answer and what was thought before it."""
        self._key_of = key_of
        self._keep = keep
        self._thoughts: list[str] = []
        self._said: list[str] = []
        self._first_call = ""

    def add(self, pieces: Sequence[AnswerPiece]) -> None:
        """What the answer has grown by."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                into = self._thoughts if piece.channel is Channel.REASONING else self._said
                into.append(piece.text)
            elif isinstance(piece, ToolCallStart):
                self._first_call = self._first_call or piece.id

    def end(self) -> None:
        """The answer has ended. Nothing is kept of one that clients would not send back."""
        said = "".join(self._said)
        if self._thoughts and (self._first_call or said.strip()):
            self._keep(self._key_of(said, self._first_call), "".join(self._thoughts))


class KeyOfAnswer:
    """Names the answers to a conversation that grows turn by turn."""

    def __init__(self, salt: PrefixSalt) -> None:
        """salt: of the request; nobody else's answers have the same names."""
        self._own = hashlib.sha256(salt.tenant + salt.client)
        self._said = self._own.copy()

    def __call__(self, text: str, first_call: str) -> bytes:
        """first_call: its id; empty where there is none."""
        digest = (self._own if first_call else self._said).copy()
        _add(digest, first_call or text.strip())
        return digest.digest()

    def say(self, turn: Turn) -> None:
        """What comes after this turn has it before."""
        calls = (call.id for call in turn.tool_calls)
        for part in (turn.role, turn.text.strip(), turn.tool_call_id or "", *calls):
            _add(self._said, part)


def _add(digest: "hashlib._Hash", text: str) -> None:
    """No two lists of texts give the same bytes."""
    encoded = text.encode()
    digest.update(len(encoded).to_bytes(LENGTH_BYTES, "little"))
    digest.update(encoded)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation with the thoughts that are known."""

    conversation: Conversation
    record: Callable[[], ThoughtRecord] | None
    """Begins to gather an answer to it; None where its thoughts would be a part of others."""


class Thoughts:
    """Those of the newest answers, up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all together; 0: none are kept."""
        self._kept: Newest[bytes, str] = Newest(max_bytes)

    def recalled(self, conversation: Conversation, salt: PrefixSalt) -> Recalled:
        """Puts thoughts into turns of the assistant that have none. salt: of the request."""
        key_of = KeyOfAnswer(salt)
        turns = []
        for turn in conversation.turns:
            turns.append(self._with_thoughts(turn, key_of))
            key_of.say(turn)
        known = replace(conversation, turns=tuple(turns))
        if known.turns and known.turns[-1].role == "assistant":
            return Recalled(known, None)
        return Recalled(known, lambda: ThoughtRecord(key_of, self._keep))

    def _with_thoughts(self, turn: Turn, key_of: KeyOfAnswer) -> Turn:
        if turn.role != "assistant" or turn.reasoning.strip():
            return turn
        first_call = turn.tool_calls[0].id if turn.tool_calls else ""
        if turn.tool_calls and not first_call:
            return turn
        found = self._kept.find(key_of(turn.text, first_call))
        return turn if found is None else replace(turn, reasoning=found)

    def _keep(self, key: bytes, thoughts: str) -> None:
        self._kept.keep(key, thoughts, len(key) + len(thoughts.encode()))
