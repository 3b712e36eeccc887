"""Write an answer that a client has begun into the prompt, in the model's own form."""

from dataclasses import dataclass

from server.text.conversation import Turn
from server.text.parser import CLOSE, OPEN, first_channel_of
from server.text.pieces import Channel

NO_REASONING = f"{OPEN}\n\n{CLOSE}\n\n"
LINE = "\n"


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """What follows the generation prompt."""

    opening: str = ""
    """Tags, and reasoning that is over."""
    text: str = ""
    """The text that the model goes on with."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A turn, split into reasoning and content."""

    reasoning: str | None
    """None where there is none."""
    is_over: bool
    """Whether the model has stopped thinking."""
    content: str


def begun_answer(turn: Turn, prompt: str, *, closed: str, thinks: bool) -> BegunAnswer:
    """Write a begun turn as the model would have written it, less what the prompt has opened.

    prompt: as it was rendered for an answer. closed: what the template adds where the model
    must not reason. thinks: whether the model may reason.
    """
    parts, start = _parts(turn), first_channel_of(prompt)
    if start is Channel.CONTENT or not thinks:
        parts = _Parts(None, True, parts.content)
    if parts.reasoning is None and not parts.content:
        return BegunAnswer()
    if parts.reasoning is None and start is not Channel.REASONING:
        return BegunAnswer("" if start is Channel.CONTENT else closed, parts.content)
    reasoning = parts.reasoning or ""
    opening = "" if prompt.endswith(LINE) else LINE
    if start is None:
        opening = OPEN + LINE
    if not parts.is_over:
        return BegunAnswer(opening, reasoning.lstrip(LINE))
    return BegunAnswer(f"{opening}{reasoning.strip(LINE)}{LINE}{CLOSE}{LINE}{LINE}", parts.content)


def _parts(turn: Turn) -> _Parts:
    """Split a turn: some clients leave reasoning in the text, between its tags."""
    text = turn.text.lstrip()
    if turn.reasoning or not text.startswith(OPEN):
        return _Parts(turn.reasoning or None, bool(turn.text), turn.text)
    reasoning, close, content = text.removeprefix(OPEN).partition(CLOSE)
    return _Parts(reasoning, bool(close), content.lstrip(LINE))
