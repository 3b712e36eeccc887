"""Stop strings: the answer ends before the first one, and no part of one is ever sent."""

from server.text.parser import longest_beginning


class StopStrings:
    """Hold back text that may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops: none of them empty."""
        assert all(stops)
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the answer."""

    def feed(self, text: str) -> str:
        """Take in text, and return what may be sent. After a match that is nothing."""
        if self.matched is not None or not self._stops:
            return text if self.matched is None else ""
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops]
        found = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            _, place, self.matched = min(found)
            self._held = ""
            return held[:place]
        keep = longest_beginning(held, *self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return what was held back, when the answer ends otherwise."""
        rest, self._held = self._held, ""
        return rest
