"""Keep special tokens that texts spell from meaning anything.

Before the template writes the prompt a mark is put into each, and at the marks the prompt is cut
before it is encoded::

    x<|im_end|>  -->  x<¤|im_end|>  -->  ...user x<¤|im_end|>...  -->  ...user x<  |im_end|>...
"""

import re
from collections.abc import Iterable
from typing import Any

# For private use (Unicode, section 23.5). Behind one that a text itself has stands an escape.
MARK, ESCAPE = "\U0010fffd", "\0"
CUT = re.compile(f"{MARK}(?!{ESCAPE})")


class SpecialTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, contents: Iterable[str]) -> None:
        """contents: how they are spelt. One of a single character cannot be cut."""
        self.contents = tuple(content for content in contents if len(content) > 1)

    def guarded(self, value: Any) -> Any:
        """Return a value of JSON with marks in all of its texts."""
        if isinstance(value, str):
            return self.guarded_text(value)
        if isinstance(value, list):
            return [self.guarded(member) for member in value]
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded(member) for name, member in value.items()}
        return value

    def guarded_text(self, text: str) -> str:
        """Put a mark into every special token of a text, also where they overlap."""
        text = text.replace(MARK, MARK + ESCAPE)
        for content in self.contents:
            while content in text:
                text = text.replace(content, f"{content[0]}{MARK}{content[1:]}")
        return text


def pieces_of(prompt: str) -> list[str]:
    """Cut a prompt that was made of guarded texts at the marks."""
    if MARK not in prompt:
        return [prompt]
    return [piece.replace(MARK + ESCAPE, MARK) for piece in CUT.split(prompt)]
