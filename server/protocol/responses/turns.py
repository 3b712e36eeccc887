"""The items of /v1/responses -> turns.

One turn of an assistant comes as several items: what it thought, what it said, and each call. They
become one turn again, so that a template writes what the model wrote, and the prompt begins with
the tokens of the one that was answered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from server.protocol.chat.continuation import NOT_CONTINUED
from server.protocol.responses.items import (
    CallItem,
    Item,
    MessageItem,
    Placed,
    ReasoningItem,
)
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import invalid
from server.text.conversation import Role, Turn

NOTHING_SAID = Turn("system")


def turns(items: Iterable[Placed], unseen: Unseen) -> tuple[Turn, ...]:
    """Merge items to turns, each with the place by which errors name it. Raises ApiError."""
    made: list[Turn] = []
    last: Item | None = None
    for place, item in items:
        if (turn := item.turn(place, unseen)) == NOTHING_SAID:
            continue
        if last is not None and _goes_on(made[-1].role, last, turn.role, item):
            made[-1] = _together(made[-1], turn, is_begun(last))
        else:
            made.append(turn)
        last = item
    return tuple(made)


def check_begun(items: Sequence[Placed]) -> None:
    """Raise ApiError for an item that is to be continued while another one follows it."""
    for (place, item), (_, after) in pairwise(items):
        by_the_model = isinstance(after, CallItem | ReasoningItem) or (
            isinstance(after, MessageItem) and after.role == "assistant"
        )
        if is_begun(item) and not by_the_model:
            raise invalid(NOT_CONTINUED, f"{place}.prefix")


def is_begun(item: Item) -> bool:
    """Return whether the next item continues this one."""
    return isinstance(item, MessageItem | ReasoningItem) and bool(item.prefix)


def _goes_on(last_role: Role, last: Item, role: Role, item: Item) -> bool:
    """Return whether an item belongs to the same turn as the one before. A model thinks before it
    says or calls anything, and says nothing twice in a row."""
    if (last_role, role) != ("assistant", "assistant"):
        return False
    if is_begun(last):
        return True
    if isinstance(item, ReasoningItem):
        return isinstance(last, ReasoningItem)
    return not (isinstance(item, MessageItem) and isinstance(last, MessageItem))


def _together(one: Turn, more: Turn, is_one: bool) -> Turn:
    """Merge two turns. is_one: whether both have the same reasoning."""
    between = "\n" if one.reasoning and more.reasoning and not is_one else ""
    return replace(
        one,
        text=one.text + more.text,
        reasoning=one.reasoning + between + more.reasoning,
        tool_calls=one.tool_calls + more.tool_calls,
    )
