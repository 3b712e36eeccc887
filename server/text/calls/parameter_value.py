"""The value of one parameter in Qwen3-Coder's calls, as it streams in.

It ends at ``</parameter>`` on a line of its own, or before another tag of the call; within a line
that tag belongs to the value. Where models leave it out, the value ends at the next parameter, or
at the tag that ends the call.
"""

import re
from collections.abc import Container

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN

FUNCTION_CLOSE, PARAMETER_OPEN = "</function>", "<parameter="
# Models write the closing tag as </parameter/> and </parameter=name> as well.
TAG = re.compile(
    r"(?P<close></parameter[ \t]*(?:=[^<>\n]*)?/?>)"
    r"|<parameter=(?P<parameter>[ \t]*[^<>\s][^<>\n]*)>"
    rf"|<function=(?P<function>[^<>\n]+)>|{FUNCTION_CLOSE}|{CALL_CLOSE}"
)
NAMED_TAGS = ("</parameter", PARAMETER_OPEN, FUNCTION_OPEN)
TAGS = (*NAMED_TAGS, FUNCTION_CLOSE, CALL_CLOSE)
FOLLOWING = (PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN)
NEXT = re.compile(r"\s*((?s:.{0,12}))")
LINE_END = re.compile(r"[ \t\r]*\n")


class ParameterValue:
    """Holds back what may be the end of the value."""

    def __init__(self, parameters: Container[str], tools: Container[str]) -> None:
        """parameters: names of the tool's own. tools: names of the tools that are offered."""
        self.rest: str | None = None
        """What follows the value; None: it goes on."""
        self._parameters = parameters
        self._tools = tools
        self._held = ""
        self._is_block: bool | None = None
        """Whether it begins on a line of its own; None before its first character."""
        self._has_sent = False
        self._searched = 0
        """So much of what is held has no tag that is still to be judged."""
        self._unclosed: tuple[int, int] | None = None
        """Where the value ends if no closing tag comes, and where the rest begins."""

    def feed(self, text: str) -> str:
        """Take in text, and return the text of the value that is certain now."""
        self._held += text
        if self._is_block is None and self._held:
            self._is_block = self._held.startswith("\n")
            self._held = self._held.removeprefix("\n")
        end = self._find_end(final=False)
        if end is not None:
            return self._end_at(*end)
        if self._unclosed is not None:
            return ""
        # A line break before a tag is no part of the value, nor is the tag's indentation.
        text = self._held[: self._searched].rstrip(" \t").removesuffix("\n")
        self._held = self._held[len(text) :]
        self._searched -= len(text)
        self._has_sent = self._has_sent or bool(text)
        return text

    def flush(self, *, cut: bool) -> str:
        """Return the other text, when the answer ends here. cut: whether the model would go on:
        then a value that has no end yet gets none."""
        end = self._find_end(final=True) or self._unclosed
        if end is None and cut:
            return self._held
        return self._end_at(*(end or (len(self._held), len(self._held))))

    def _end_at(self, end: int, rest: int) -> str:
        self.rest = self._held[rest:]
        return self._held[:end].removesuffix("\n")

    def _find_end(self, *, final: bool) -> tuple[int, int] | None:
        """Return where the value ends, and where the rest begins; None while that is open."""
        held = self._held
        for tag in TAG.finditer(held, self._searched):
            start = tag.start()
            line = held.rfind("\n", 0, start) + 1
            begins_line = not held[line:start].strip(" \t") and (line > 0 or not self._has_sent)
            end = line if begins_line else start, start
            following = NEXT.match(held, tag.end())
            after = following[1] if following else ""
            is_last = after.startswith(FOLLOWING) or (final and not after)
            if tag["close"]:
                if is_last or (begins_line and LINE_END.match(held, tag.end())):
                    return start, tag.end()
            elif name := tag["parameter"]:
                if begins_line or (not self._is_block and name.strip() in self._parameters):
                    return end
                continue
            elif (name := tag["function"]) or self._unclosed is not None:
                if name and name.strip() in self._tools and self._unclosed is not None:
                    return self._unclosed
                continue
            elif begins_line or is_last:
                self._unclosed = end
                continue
            if not final and any(each.startswith(after) for each in FOLLOWING):
                self._searched = start
                return None
        place = held.rfind("<", self._searched)
        self._searched = place if place >= 0 and _may_be_tag(held[place:]) else len(held)
        return None


def _may_be_tag(text: str) -> bool:
    is_named = text.startswith(NAMED_TAGS) and not {">", "\n"} & set(text)
    return is_named or any(each.startswith(text) for each in TAGS)
