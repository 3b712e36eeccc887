"""An answer that a client has begun -> what stands of it in the prompt, in the model's own form."""

from dataclasses import dataclass

from server.conversation import Turn
from server.text.parser import CLOSE, OPEN, first_channel_of
from server.text.pieces import Channel

NO_THOUGHTS = f"{OPEN}\n\n{CLOSE}\n\n"
LINE = "\n"


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """What follows the generation prompt."""

    opening: str = ""
    """Tags, and thoughts that are over."""
    text: str = ""
    """Of the part that the model goes on with."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A turn, taken apart."""

    thoughts: str | None
    """None where nothing was thought."""
    is_over: bool
    """Whether the model has stopped thinking."""
    said: str


def begun_answer(turn: Turn, prompt: str, *, closed: str, thinks: bool) -> BegunAnswer:
    """The turn as the model would have written it, less what the prompt has opened.

    prompt: as it was rendered for an answer. closed: what the template adds to one that leaves
    thoughts to the model, so that it has none. thinks: whether the model may think.
    """
    parts, start = _parts(turn), first_channel_of(prompt)
    if start is Channel.CONTENT or not thinks:
        parts = _Parts(None, True, parts.said)
    if parts.thoughts is None and not parts.said:
        return BegunAnswer()
    if parts.thoughts is None and start is not Channel.REASONING:
        return BegunAnswer("" if start is Channel.CONTENT else closed, parts.said)
    thoughts = parts.thoughts or ""
    opening = "" if prompt.endswith(LINE) else LINE
    if start is None:
        opening = OPEN + LINE
    if not parts.is_over:
        return BegunAnswer(opening, thoughts.lstrip(LINE))
    return BegunAnswer(f"{opening}{thoughts.strip(LINE)}{LINE}{CLOSE}{LINE}{LINE}", parts.said)


def _parts(turn: Turn) -> _Parts:
    """Some clients leave thoughts in the text, between their tags."""
    text = turn.text.lstrip()
    if turn.reasoning or not text.startswith(OPEN):
        return _Parts(turn.reasoning or None, bool(turn.text), turn.text)
    thoughts, close, said = text.removeprefix(OPEN).partition(CLOSE)
    return _Parts(thoughts, bool(close), said.lstrip(LINE))
