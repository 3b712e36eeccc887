"""Keep the reasoning of the newest answers, for clients that do not send it back.

Some templates write earlier reasoning into the prompt. If a client omits the reasoning, the prompt
no longer matches the cached prefix. So this cache puts the reasoning back.

The key of an answer with calls is made from the random id of the first call. The key of any other
answer is made from the answer's text and all earlier turns, because short answers are often equal.
Two tenants (API keys) never share a key."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.types import PrefixSalt
from server.text.conversation import Channel, Conversation, Turn
from server.text.newest import Newest
from server.text.pieces import Delta, TextPiece, ToolCallStart

LENGTH_BYTES = 8


class ReasoningRecorder:
    """Collects the reasoning of one answer while it streams."""

    def __init__(self, key_of: "KeyOfAnswer", keep: Callable[[bytes, str], None]) -> None:
        """``key_of`` computes the answer's key. ``keep`` stores the reasoning under this key."""
        self._key_of = key_of
        self._keep = keep
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._first_call = ""

    def observe(self, delta: Delta) -> None:
        """Add a delta. After the last delta, store the reasoning if the answer has text or calls,
        from which the key is made."""
        for piece in delta.pieces:
            if isinstance(piece, TextPiece):
                into = self._reasoning if piece.channel is Channel.REASONING else self._content
                into.append(piece.text)
            elif isinstance(piece, ToolCallStart):
                self._first_call = self._first_call or piece.id
        if delta.finish is None or not self._reasoning:
            return
        content = "".join(self._content)
        if self._first_call or content.strip():
            self._keep(self._key_of(content, self._first_call), "".join(self._reasoning))


class KeyOfAnswer:
    """Computes keys for the answers of a conversation. Turns are added one at a time."""

    def __init__(self, salt: PrefixSalt) -> None:
        """``salt`` makes the keys of different tenants (API keys) differ."""
        self._own = hashlib.sha256(salt.tenant + salt.client)
        self._history = self._own.copy()

    def __call__(self, text: str, first_call: str) -> bytes:
        """Return an answer's key. ``first_call`` is the first call's id, or "" without calls."""
        digest = (self._own if first_call else self._history).copy()
        _add(digest, first_call or text.strip())
        return digest.digest()

    def add_turn(self, turn: Turn) -> None:
        calls = (call.id for call in turn.tool_calls)
        for part in (turn.role, turn.text.strip(), turn.tool_call_id or "", *calls):
            _add(self._history, part)


def _add(digest: "hashlib._Hash", text: str) -> None:
    """Hash a text's length and then the text, so that different lists of texts hash differently."""
    encoded = text.encode()
    digest.update(len(encoded).to_bytes(LENGTH_BYTES, "little"))
    digest.update(encoded)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation to which cached reasoning has been added."""

    conversation: Conversation
    new_recorder: Callable[[], ReasoningRecorder] | None
    """Makes the recorder of the new answer. It is None if the answer continues the last turn."""


class ReasoningCache:
    """The reasoning of the newest answers, up to a total number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` limits the keys and all reasoning together. With 0, nothing is stored."""
        self._kept: Newest[bytes, str] = Newest(max_bytes)

    def recall(self, conversation: Conversation, salt: PrefixSalt) -> Recalled:
        """Add the cached reasoning to assistant's turns that have no reasoning."""
        key_of = KeyOfAnswer(salt)
        turns = []
        for turn in conversation.turns:
            turns.append(self._with_reasoning(turn, key_of))
            key_of.add_turn(turn)
        known = replace(conversation, turns=tuple(turns))
        if known.turns and known.turns[-1].role == "assistant":
            return Recalled(known, None)
        return Recalled(known, lambda: ReasoningRecorder(key_of, self._keep))

    def _with_reasoning(self, turn: Turn, key_of: KeyOfAnswer) -> Turn:
        if turn.role != "assistant" or turn.reasoning.strip():
            return turn
        first_call = turn.tool_calls[0].id if turn.tool_calls else ""
        if turn.tool_calls and not first_call:
            return turn
        reasoning = self._kept.find(key_of(turn.text, first_call))
        return turn if reasoning is None else replace(turn, reasoning=reasoning)

    def _keep(self, key: bytes, reasoning: str) -> None:
        self._kept.keep(key, reasoning, len(key) + len(reasoning.encode()))
