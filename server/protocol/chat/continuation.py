"""Whether the last message, the assistant's, is the beginning of the answer."""

from server.protocol.common import WireModel
from server.protocol.wire_errors import invalid
from server.text.conversation import Turn

NOT_CONTINUED = "Only the assistant's message can be continued, and only as the last one."


class ContinuationFields(WireModel):
    """What says so for the whole request, by the names that vLLM has for it. ``prefix`` on the
    message itself says it, too."""

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def continues(self, last: Turn, *, marked: bool) -> bool:
        """Return whether the answer goes on with the last message. marked: whether that says so
        itself. Raises ApiError."""
        if not (marked or self.continue_final_message):
            return False
        if last.role != "assistant":
            raise invalid(NOT_CONTINUED, "continue_final_message")
        if self.add_generation_prompt:
            raise invalid(
                "A message that is continued is no new one: add_generation_prompt must be false, "
                "or left out.",
                "add_generation_prompt",
            )
        return True

    def check_answered(self, *, continues: bool) -> None:
        """Raise ApiError where the prompt should end before the answer begins."""
        if self.add_generation_prompt is False and not continues:
            raise invalid(
                "add_generation_prompt: false is only supported with continue_final_message: the "
                "answer is the assistant's next turn.",
                "add_generation_prompt",
            )
