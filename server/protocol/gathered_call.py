"""A call, for APIs that send it when it is all there."""

import json
from dataclasses import dataclass

from server.protocol.answers import Json
from server.text.calls.tool_format import CALL_OPEN
from server.text.json_object import json_object
from server.text.pieces import ToolCallStart


@dataclass(slots=True)
class GatheredCall:
    """A call that is not all there: what follows may show that it is none."""

    start: ToolCallStart
    arguments: str = ""

    @property
    def input(self) -> Json | None:
        """The arguments; None where they are no object."""
        return json_object(self.arguments)

    @property
    def text(self) -> str:
        """As content, for a call that nobody could make."""
        name = json.dumps(self.start.name, ensure_ascii=False)
        return f'{CALL_OPEN}\n{{"name": {name}, "arguments": {self.arguments}'
