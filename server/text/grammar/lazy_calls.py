"""Constrain calls where a model may make them: text is free, and a call, once begun, has its tool's
form."""

import numpy as np

from server.text.calls.tool_format import CALL_OPEN
from server.text.grammar.constraints import GrammarConstraint, TagWatch
from server.text.grammar.vocabulary import Vocabulary

OPEN_TAG = CALL_OPEN.encode()


class LazyCalls:
    """Watch for the opening tag of a call; from there on its grammar holds, until it is over."""

    def __init__(self, call: GrammarConstraint, vocabulary: Vocabulary) -> None:
        """call: what follows the opening tag, up to and with the closing one."""
        self._call = call
        self._vocabulary = vocabulary
        self._open = TagWatch(OPEN_TAG)
        self._running: GrammarConstraint | None = None

    def fill_mask(self, row: np.ndarray) -> bool:
        """See TokenConstraint."""
        if self._running is not None:
            return self._running.fill_mask(row)
        np.copyto(row, self._vocabulary.calling_masks[self._open.matched])
        return True

    def accept(self, token_id: int) -> None:
        """See TokenConstraint."""
        if self._running is None:
            if self._open.feed(self._vocabulary.token_bytes(token_id)):
                self._running = self._call.copy()
            return
        self._running.accept(token_id)
        if self._running.complete:
            self._running = None
            self._open = TagWatch(OPEN_TAG)

    def copy(self) -> "LazyCalls":
        """See TokenConstraint."""
        return LazyCalls(self._call, self._vocabulary)
