"""One call in JSON: ``{"name": "f", "arguments": {"x": 1}}`` between two tags, or Llama's."""

import json
import re
from collections.abc import Callable

from server.text.calls.json_mender import JsonMender
from server.text.calls.tool_format import CALL_CLOSE, ToolFormat, is_called
from server.text.conversation import Tool
from server.text.json_object import json_object
from server.text.pieces import AnswerPiece, ToolCallArguments, ToolCallStart

# By which names models give arguments, the usual one first.
ARGUMENTS = ("arguments", "parameters", "args", "input")
BESIDES = {"name", "type", "id"}
# No name has what could begin the closing tag, so that it does not matter how the text is cut.
NAMED = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\<\x00-\x1f]+)"'
NAME = re.compile(NAMED)
# Where arguments begin that are sent as they come.
HEAD = re.compile(NAMED + r'\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
NO_CALL = {
    ToolFormat.HERMES: re.compile(r"\s*[^\s{]"),
    # Other JSON is an answer, and need not wait for its end.
    ToolFormat.LLAMA: re.compile(
        rf'\s*(?:[^\s{{]|\{{\s*(?:[^\s"]|"(?!(?:name|type|{"|".join(ARGUMENTS)})")[^"]*"))'
    ),
}
ENDS = {ToolFormat.HERMES: CALL_CLOSE, ToolFormat.LLAMA: ";"}
# What comes after more than this is read when it is whole.
MAX_HEAD_CHARS = 1024
# Behind arguments: brackets, and what else the call has.
FILLING = re.compile(r'\s*(?:,\s*(?:"[^<]*|$))?[\s}]*')


class HermesCall:
    """Read what follows an opening tag, as it streams in.

    The arguments are sent as they are written, but for what JSON does not allow. A call that does
    not come in the usual order is read when it is whole. What is neither is no call.
    """

    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],
        tools: tuple[Tool, ...],
        form: ToolFormat = ToolFormat.HERMES,
    ) -> None:
        self.started = False
        self.complete = False
        """Whether all of the arguments are there."""
        self.rest: str | None = None
        """What follows the call, or all of it when it has turned out not to be one; None: it goes
        on."""
        self._index = index
        self._new_id = new_id
        self._tools = tools
        self._form = form
        self._end = ENDS[form]
        self._held = ""
        self._searched = 0
        """So much of what is held does not begin with the closing tag: it is not read again with
        every token."""
        self._json = JsonMender()

    @property
    def unread(self) -> str:
        """Text that has come and belongs to nothing yet."""
        return self._held

    @property
    def closing(self) -> str:
        """What follows arguments that are complete; "" where no tag does."""
        return f"}}\n{CALL_CLOSE}" if self._end == CALL_CLOSE else ""

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take in text, and return the pieces of the call that are certain now."""
        self._held += text
        pieces: list[AnswerPiece] = []
        if not self.started:
            pieces += self._take_head()
        if self.started and not self.complete:
            pieces += self._take_arguments()
        if self.complete and self.rest is None:
            self._take_tail()
        return pieces

    def flush(self, *, cut: bool) -> list[AnswerPiece]:
        """Return the other pieces, when the answer ends here. cut: what is missing stays missing,
        because the model would go on."""
        if not self.started:
            return self._take_whole(self._held, "")
        if self.complete:
            self.rest = ""
            return []
        if cut:
            return self._arguments(self._json.unread + self._held)
        return self._arguments(self._json.end())

    def _take_head(self) -> list[AnswerPiece]:
        name = NAME.match(self._held, 0, MAX_HEAD_CHARS)
        is_other = name is not None and not is_called(name[1], self._tools)
        if is_other or NO_CALL[self._form].match(self._held, 0, MAX_HEAD_CHARS):
            self.rest = self._held
            return []
        found = HEAD.match(self._held, 0, MAX_HEAD_CHARS)
        # With parameters there may be arguments as well, further on.
        if found and (found[2] == ARGUMENTS[0] or self._form is ToolFormat.LLAMA):
            self._held = self._held[found.end() :]
            return self._start(found[1])
        place = self._held.find(CALL_CLOSE, self._searched)
        if place >= 0 and self._end == CALL_CLOSE:
            return self._take_whole(self._held[:place], self._held[place + len(CALL_CLOSE) :])
        self._searched = max(0, len(self._held) - len(CALL_CLOSE))
        return []

    def _take_whole(self, text: str, rest: str) -> list[AnswerPiece]:
        found = whole_call(text)
        if found is None or not is_called(found[0], self._tools):
            self.rest = self._held
            return []
        name, arguments = found
        self.complete, self._held, self.rest = True, rest, rest
        return [*self._start(name), *self._arguments(arguments)]

    def _take_arguments(self) -> list[AnswerPiece]:
        """Take text up to the bracket that closes the first one; or to the closing tag, where it
        comes first and outside of strings: then the model has forgotten brackets."""
        text: list[str] = []
        taken = len(self._held)
        for place, character in enumerate(self._held):
            if character == self._end[0] and not self._json.in_string:
                after = self._held[place:]
                self.complete = after.startswith(self._end)
                if self.complete:
                    text.append(self._json.end())
                if self.complete or self._end.startswith(after):
                    taken = place
                    break
            text.append(self._json.feed(character))
            if self._json.is_whole:
                self.complete, taken = True, place + 1
                break
        self._held = self._held[taken:]
        return self._arguments("".join(text))

    def _take_tail(self) -> None:
        filling = FILLING.match(self._held)
        assert filling is not None
        after = self._held[filling.end() :]
        if after.startswith(self._end):
            self.rest = after[len(self._end) :]
        elif not self._end.startswith(after):
            self.rest = after

    def _start(self, name: str) -> list[AnswerPiece]:
        self.started = True
        return [ToolCallStart(self._index, self._new_id(), name)]

    def _arguments(self, text: str) -> list[AnswerPiece]:
        return [ToolCallArguments(self._index, text)] if text else []


def whole_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is all there; None where it is none.

    The arguments may be an object, the same as a string, or left out, where nothing else may be
    them.
    """
    call = json_object(text) or {}
    name = call.get("name")
    arguments = next((call[key] for key in ARGUMENTS if call.get(key)), None)
    has_others = not call.keys() & {*ARGUMENTS} and call.keys() - BESIDES
    if not isinstance(name, str) or not name or has_others:
        return None
    if isinstance(arguments, str):
        arguments = json_object(arguments)
        if arguments is None:
            return None
    if not isinstance(arguments, dict | None):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)
