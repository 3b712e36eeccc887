"""Calls of functions with limits of time and memory, in a process of their own."""

import builtins
import io
import json
import operator
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.text import limited_process
from server.text.limited_process import LimitedProcess, LimitError, Limits

MIB = 1 << 20
SHORT, LONG = Limits(2.0, 512 * MIB), Limits(20.0, 300 * MIB)


def request(work: Callable[..., Any], arguments: list[Any], seconds: float, memory: int) -> bytes:
    call = [work.__module__, work.__qualname__, arguments, [seconds, memory]]
    return json.dumps(call).encode() + b"\n"


def test_calls_have_one_process_until_a_limit_is_exceeded() -> None:
    with LimitedProcess() as process:
        first = process.call(SHORT, os.getpid)
        assert first != os.getpid()
        assert process.call(SHORT, operator.add, "é" * 10**5, "x") == "é" * 10**5 + "x"
        assert process.call(SHORT, os.getpid) == first
        began = time.monotonic()
        with pytest.raises(LimitError, match=r"^it takes more than 2 s$") as error:
            process.call(SHORT, time.sleep, 600)
        assert error.value.begun
        assert time.monotonic() - began < 60
        assert process.call(SHORT, os.getpid) != first


@pytest.mark.parametrize(
    ("work", "arguments", "fault"),
    [
        (operator.mul, ["x", 500 * MIB], "it takes more than 300 MiB of memory"),
        (operator.mul, ["x", 5 * MIB], "it takes more than 4 MiB of answers"),
        (operator.truediv, [1, 0], "its process ended with 1"),
        (os._exit, [3], "its process ended with 3"),
        (os._exit, [limited_process.NO_MEMORY_CODE], "it takes more than 300 MiB of memory"),
        (os.abort, [], "its process ended with -6"),
        (signal.raise_signal, [signal.SIGXCPU], "it takes more than 20 s"),
        (operator.mul, [1e308, 10], None),
        (os.write, [1, "no bytes"], "its process ended with 1"),
    ],
)
def test_what_comes_to_no_answer_is_said(
    work: Callable[..., Any], arguments: list[Any], fault: str | None
) -> None:
    with LimitedProcess() as process:
        if fault is None:
            assert process.call(LONG, work, *arguments) == float("inf")
            return
        with pytest.raises(LimitError) as error:
            process.call(LONG, work, *arguments)
    assert (str(error.value), error.value.begun) == (fault, True)


@pytest.mark.parametrize(
    ("program", "fault", "begun"),
    [
        ("import sys; sys.exit(3)", "its process ended with 3", False),
        ("import os, time; os.close(0); time.sleep(60)", "it takes more than 1 s", False),
        ("print('ready'); print('what?')", "its process writes what is no JSON", True),
    ],
)
@pytest.mark.usefixtures("limited_program")
def test_a_process_that_obeys_no_protocol_is_ended(program: str, fault: str, begun: bool) -> None:
    """Nor need it read what it is told."""
    with LimitedProcess() as process, pytest.raises(LimitError) as error:
        process.call(SHORT, operator.add, "x" * 10**6, "y")
    assert (str(error.value), error.value.begun) == (fault, begun)


@pytest.mark.parametrize(
    ("work", "arguments", "memory_bytes", "code"),
    [
        (builtins.pow, [3, 10**8], 512 * MIB, -signal.SIGXCPU),
        pytest.param(
            operator.mul,
            ["x", 2**32],
            MIB,
            limited_process.NO_MEMORY_CODE,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="addresses have no limit"),
        ),
    ],
)
def test_the_process_keeps_its_limits_where_nobody_watches(
    work: Callable[..., Any], arguments: list[Any], memory_bytes: int, code: int
) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "server.text.limited_process"],
        input=request(work, arguments, 1.0, memory_bytes),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (process.returncode, process.stdout) == (code, b"ready\n")


def test_the_process_says_when_it_begins_and_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[int] = []
    calls: list[tuple[Callable[..., Any], list[Any]]] = [
        (operator.add, [1, 2]),
        (operator.mul, [3, 4]),
        (operator.mul, ["x", 2**62]),
    ]
    given = b"".join(request(work, arguments, 1.0, MIB) for work, arguments in calls)
    written = io.TextIOWrapper(io.BytesIO())
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "argv", ["", "colorsys"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _: limits.append(kind))
    with pytest.raises(SystemExit) as end:
        limited_process.main()
    assert end.value.code == limited_process.NO_MEMORY_CODE
    assert written.buffer.getvalue() == b"ready\n3\nready\n12\nready\n"
    assert "colorsys" in sys.modules
    assert limits == [resource.RLIMIT_CPU, resource.RLIMIT_AS] * 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    limited_process.main()
