"""What becomes of images and files in a conversation: models here read text alone."""

from server.config import UnseenRule
from server.protocol.wire_errors import ApiError, invalid, quoted

IMAGES = frozenset({"image", "image_url", "input_image"})
FILES = frozenset({"document", "file", "input_file"})


class Unseen:
    """The images and files of one request. Each becomes a note in its place, or is refused."""

    def __init__(self, rule: UnseenRule, setting: str) -> None:
        """setting: the name of the one that the rule comes from, for errors."""
        self.count = 0
        """Those that the model is told of and not shown."""
        self._rule = rule
        self._setting = setting

    def note(self, kind: str, place: str) -> str:
        """Return the text that the model reads instead of content that has none. kind: its type on
        the wire. Raises ApiError (400) that names the place."""
        if kind not in IMAGES | FILES:
            raise unsupported(kind, place)
        if self._rule == "refuse":
            raise unsupported(
                kind, place, f' With {self._setting} = "placeholder" the server leaves it out.'
            )
        self.count += 1
        return f"[{'image' if kind in IMAGES else 'file'} not shown: this server reads text only]"


def unsupported(kind: str, place: str, remedy: str = "") -> ApiError:
    """Make the 400 for content that no prompt can have."""
    return invalid(
        f"Content of type {quoted(kind)} is not supported here: this model reads text.{remedy}",
        place,
    )
