"""What may hang, crash or take too much runs in a process that has limits, and leaves nothing."""

import builtins
import operator
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcache import child as module
from kvcache.child import NO_MEMORY_CODE, Cause, Child, LimitError, Limits, end, run, serve
from tests.metal_ext.programs import CHECKOUT

MIB = 1 << 20
LIMITS = Limits(600.0, 600.0, 500 * MIB)
BRIEF, LEAN = Limits(0.2, 600.0, 500 * MIB), Limits(600.0, 600.0, 99 * MIB)
SHORT = Limits(600.0, 0.2, 500 * MIB)
WITHIN_S = 100.0
# It takes longer than any limit.
POWER: tuple[Any, list[Any]] = (builtins.pow, [3, 10**8])


def make_forking(value: Any) -> Child:
    """A child whose calls get this value as their first argument."""
    return Child(prepare=(operator.getitem, [value], 0))


def catch_fault(child: Child, limits: Limits, work: Any, *arguments: Any) -> tuple[str, Cause]:
    with pytest.raises(LimitError) as error:
        child.call(limits, work, *arguments)
    return str(error.value), error.value.cause


def eventually(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def find_descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def have_ended(*pids: int) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_calls_have_one_process_until_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Child()) as child:
        first = child.call(LIMITS, os.getpid)
        assert child.call(LIMITS, operator.add, "é" * 10**5, "x") == "é" * 10**5 + "x"
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as on macOS
        assert child.call(LIMITS, os.fspath, Path("x")) == "x"
        assert child.call(LIMITS, os.getpid) == first != os.getpid()
        catch_fault(child, SHORT, time.sleep, 600)
        assert have_ended(first)
        assert child.call(LIMITS, os.getpid) != first


def test_calls_of_a_child_that_forks_run_at_once_until_it_is_closed_or_ends() -> None:
    before = find_descendants()
    with closing(make_forking(600)) as child, ThreadPoolExecutor() as threads:
        leader = child.start()[0]
        sleeping = [threads.submit(catch_fault, child, SHORT, time.sleep) for _ in range(2)]
        lean = replace(LIMITS, memory_bytes=9 * MIB)  # less than what is inherited
        assert child.call(lean, operator.add, 7) == 607
        assert [each.result()[1] for each in sleeping] == [Cause.WALL] * 2
        assert child.start()[0] is leader
        asleep = threads.submit(catch_fault, child, LIMITS, time.sleep)
        eventually(lambda: len(find_descendants() - before) == 2)
        child.close()
        assert asleep.result()[1] is Cause.NOT_RUN
        assert not find_descendants() - before
        killed = child.start()[0]
        killed.kill()
        killed.wait()  # another start() may begin the next one already
        assert child.call(LIMITS, operator.add, 7) == 607


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(
    ("work", "arguments", "limits", "fault", "cause"),
    [
        (*POWER, BRIEF, "it takes more than 0 s", Cause.CPU),
        (time.sleep, [600], SHORT, "it takes more than 0 s", Cause.WALL),
        (operator.mul, ["x", 300 * MIB], LEAN, "it takes more than 99 MiB of memory", Cause.MEMORY),
        (operator.mul, ["x", 5 * MIB], LIMITS, "it takes more than 4 MiB of answers", Cause.DIED),
        (operator.truediv, [1, 0], LIMITS, "its process ended with 1", Cause.DIED),
        (os._exit, [3], LIMITS, "its process ended with 3", Cause.DIED),
        (signal.raise_signal, [signal.SIGSEGV], LIMITS, "its process ended with -11", Cause.DIED),
    ],
)
def test_a_call_without_a_result_has_a_reason_and_leaves_no_process(
    forks: bool, work: Any, arguments: list[Any], limits: Limits, fault: str, cause: Cause
) -> None:
    before = find_descendants()
    with closing(make_forking(arguments[0]) if forks else Child()) as child:
        assert catch_fault(child, limits, work, *arguments[forks:]) == (fault, cause)
        # The process that forks goes on.
        eventually(lambda: len(find_descendants() - before) == forks)
    assert not find_descendants() - before


@pytest.mark.parametrize(
    ("program", "fault", "cause"),
    [
        ("import sys; sys.exit(3)", "its process ended with 3", Cause.NOT_RUN),
        ("import time; time.sleep(600)", "it takes more than 1 s", Cause.NOT_RUN),
        ("tell(b'{\"pid\": 1}'); sys.exit(3)", "its process ended with 3", Cause.DIED),
        ("tell(b'{\"code\": 7}')", "its process ended with 7", Cause.NOT_RUN),
        ("tell(b'what?')", "its process writes what is no JSON", Cause.DIED),
    ],
)
def test_a_process_that_obeys_no_protocol_is_ended(
    program: str, fault: str, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = (
        "import socket, sys; calls = socket.socket(fileno=int(sys.argv[1])); "
        "tell = lambda line: socket.socket(fileno=socket.recv_fds(calls, 1, 2)[1][1])"
        ".sendall(line + b'\\n'); "
    )
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", begin + program))
    monkeypatch.setattr(module, "START_LIMIT_S", 1.0 if "1 s" in fault else WITHIN_S)
    before = find_descendants()
    assert catch_fault(Child(), LIMITS, operator.add, "x" * 10**6, "y") == (fault, cause)
    assert not find_descendants() - before


@pytest.mark.parametrize("prepare", [None, "(operator.getitem, [600], 0)"])
def test_a_child_hears_no_ctrl_c_and_ends_with_its_parent(prepare: str | None) -> None:
    program = (
        "import operator, threading, time; from kvcache.child import Child, Limits;"
        f"child = Child(prepare={prepare}); limits = Limits(600, 600, 1 << 30);"
        f"call = lambda: child.call(limits, time.sleep{'' if prepare else ', 1'});"
        "threading.Thread(target=call).start(); print(child.start()[0].pid, flush=True);"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        leader = psutil.Process(int(parent.stdout.readline()))
        eventually(lambda: prepare is None or bool(leader.children()))
        family = [leader.pid, *(each.pid for each in leader.children())]
        os.killpg(parent.pid, signal.SIGINT)
        time.sleep(0.1)
        assert not any(map(have_ended, family))
        parent.kill()
    eventually(lambda: have_ended(*family))


@pytest.mark.parametrize(
    ("work", "arguments", "limits", "code"),
    [
        (*POWER, BRIEF, -signal.SIGPROF),
        (time.sleep, [600], SHORT, -signal.SIGALRM),
        pytest.param(
            *(operator.mul, ["x", 2**32], Limits(600, 600, MIB), NO_MEMORY_CODE),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="addresses have no limit"),
        ),
    ],
)
def test_a_process_keeps_its_limits_where_nobody_watches(
    work: Any, arguments: list[Any], limits: Limits, code: int
) -> None:
    with closing(Child()) as child:
        process, calls = child.start()
        with open_call(calls, work, *arguments, limits=limits):
            assert process.wait(WITHIN_S) == code


def test_threat_19_a_process_is_given_no_keys_and_no_files_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the working directory is not imported in place of the real one."""
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", "sk-zebra-canary-0123456789")
    for name in ("kvcache", "colorsys"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('zebra')")
    monkeypatch.chdir(tmp_path)
    with closing(Child({"MORE": "more"}, ["colorsys"])) as child:
        given = child.call(LIMITS, subprocess.getoutput, "env").splitlines()
    assert "MORE=more" in given
    names = {line.partition("=")[0] for line in given}
    assert names <= {*module.KEPT, "MORE", "LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"}


# --- a child's own process, in this one -----------------------------------------------------------


def open_call(
    calls: socket.socket, work: Any, *arguments: Any, limits: Limits = LIMITS
) -> socket.socket:
    """The connection of a call whose limits no parent enforces."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WITHIN_S)
    with theirs, module._write_file([work, arguments, astuple(limits)]) as request:
        socket.send_fds(calls, [b"c"], [request.fileno(), theirs.fileno()])
    return ours


@pytest.mark.parametrize(
    ("work", "argument", "code"),
    [(operator.add, "y", 0), (operator.mul, 2**62, NO_MEMORY_CODE), (operator.mul, None, 1)],
)
@pytest.mark.parametrize("forks", [False, True])
def test_a_call_is_run_within_limits_in_the_process_or_a_forked_one(
    forks: bool, work: Any, argument: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, limited = list[int](), list[Any]()

    def exit_with(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", exit_with)
    monkeypatch.setattr(os, "nice", limited.append)
    monkeypatch.setattr(signal, "setitimer", lambda _, seconds: limited.append(seconds))
    monkeypatch.setattr(signal, "alarm", limited.append)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _: limited.append(kind))
    calls, theirs = socket.socketpair()
    arguments = [argument] if forks else ["x", argument]
    limits = Limits(1.5, 2.5, MIB, nice=3)
    with calls, theirs, open_call(calls, work, *arguments, limits=limits) as connection:
        calls.shutdown(socket.SHUT_WR)
        with suppress(SystemExit):
            serve(theirs, ["colorsys"], ["operator:getitem", ["x"], 0] if forks else None)
        assert codes == ([code] if code or forks else [])
        assert (theirs.fileno() == -1) == forks, "a forked process holds nothing of its parent's"
        result = b"" if code else b'{"result": "xy"}\n'
        assert connection.recv(1000) == b'{"pid": %d}\n%s' % (os.getpid(), result)
    begin = [3, 1.5, 4, *([] if forks else [resource.RLIMIT_AS])]
    assert limited == begin + ([] if code else [0, 0])


def test_the_end_of_a_forked_process_is_told_and_one_that_nobody_waits_for_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shells = [subprocess.Popen(["sh", "-c", text]) for text in ("exit 3", *["exec sleep 600"] * 2)]
    pids = [each.pid for each in shells]
    monkeypatch.setattr(os, "fork", lambda: pids.pop(0))
    calls, theirs = socket.socketpair()
    serving = threading.Thread(target=serve, args=(theirs, [], ["operator:getitem", [0], 0]))
    with theirs:
        with calls:
            serving.start()
            with open_call(calls, operator.add) as connection:
                assert connection.recv(1000) == b'\n{"code": 3}\n'
            open_call(calls, operator.add).close()
            eventually(lambda: have_ended(shells[1].pid))
            kept = open_call(calls, operator.add)
            eventually(lambda: not pids)
        serving.join(WITHIN_S)
    kept.close()
    assert shells[2].wait(WITHIN_S) == -signal.SIGKILL
    assert shells[0].wait() == shells[1].wait() == 0, "reaped before"


# --- programs -------------------------------------------------------------------------------------


def test_a_program_is_told_by_its_code_and_its_last_lines() -> None:
    program = "printf ' one\\n\\n two \\n'; printf '\\377!' >&2; exit 5"
    assert run(["sh", "-c", program], WITHIN_S) == (5, ["one", "two"], ["\ufffd!"])
    long = f"head -c {module.OUTPUT_BYTES} /dev/zero | tr '\\0' 'x'; echo; echo end"
    _, lines, errors = run(["sh", "-c", long], WITHIN_S)
    assert (len(lines[0]), lines[1:], errors) == (module.OUTPUT_BYTES - 5, ["end"], [])


def test_a_program_that_hangs_is_killed_with_all_that_it_has_started_whatever_it_ignores() -> None:
    program = "trap '' TERM INT HUP; sleep 600 & echo $$ $!; sleep 600"
    code, lines, _ = run(["sh", "-c", program], 1.0)
    assert code is None
    eventually(lambda: have_ended(*map(int, lines[0].split())))


def test_a_program_ends_where_its_caller_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupted(process: Any, _: float) -> None:
        monkeypatch.undo()
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["sleep", "600"], 600.0)
    assert started[0].returncode == -signal.SIGKILL


def test_a_process_that_does_not_even_end_when_it_is_killed_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(module, "KILL_LIMIT_S", 0.1)
        assert end(sleeping) is None
    assert end(sleeping) == end(sleeping) == -signal.SIGKILL
