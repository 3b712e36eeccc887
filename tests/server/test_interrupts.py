"""Ctrl-C says something else in a block, and what was said before it is said again after it."""

import signal
import sys
import textwrap
import threading

import pytest

from server.interrupts import interrupt_says
from tests.clients.servers import run_to_end

PROGRAM = """
    import os, signal, sys
    from server.interrupts import end_at_interrupt, interrupt_says

    end_at_interrupt()
    {edit}
    {block}
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("edit", "block", "said"),
    [
        ("", "if True:", "quire: ended by Ctrl-C\n"),
        ("", "with interrupt_says(lambda: 'kept 1 byte'):", "quire: kept 1 byte\n"),
        ("with interrupt_says(lambda: 'no'): pass", "if True:", "quire: ended by Ctrl-C\n"),
        ("os.close(2)", "if True:", ""),
        ("os.isatty = lambda _: True", "if True:", "\nquire: ended by Ctrl-C\n"),
    ],
)
def test_an_interrupt_is_one_sentence_and_an_end_by_the_signal(
    edit: str, block: str, said: str
) -> None:
    program = textwrap.dedent(PROGRAM).format(edit=edit, block=block)
    ended = run_to_end(sys.executable, "-c", program)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, said)


def test_other_threads_leave_the_signal_alone() -> None:
    handlers: list[object] = []

    def run() -> None:
        with interrupt_says(lambda: "no"):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_the_sentence_is_written_before_the_signal_is_raised_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupt_says(lambda: "kept"):
            handler = signal.getsignal(signal.SIGINT)
            assert callable(handler)
            handler(signal.SIGINT, None)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert (capfd.readouterr().err, raised) == ("quire: kept\n", [signal.SIGINT])
