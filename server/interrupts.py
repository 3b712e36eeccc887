"""Ends the process with one sentence at Ctrl-C, until a server handles the signal itself."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def end_at_interrupt(sentence: Callable[[], str] = lambda: "ended by Ctrl-C") -> None:
    """Have Ctrl-C write a sentence, then end the process by SIGINT's default action, so that shells
    see the cause. A KeyboardInterrupt would show a traceback from within some import or library."""

    def end(*_: object) -> None:
        with suppress(OSError):
            # Terminals show ^C, and a progress bar, at the beginning of this line.
            os.write(2, f"{chr(10) * os.isatty(2)}quire: {sentence()}\n".encode())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, end)


@contextmanager
def interrupt_says(sentence: Callable[[], str]) -> Iterator[None]:
    """Have Ctrl-C write another sentence in this block. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    end_at_interrupt(sentence)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
