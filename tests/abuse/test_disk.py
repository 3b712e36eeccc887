"""A full disk, and a system that lets no file grow: what quire writes is its log and its heaps."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.abuse.processes import END_LIMIT_S, SMALL, port_of
from tests.clients.servers import QUIRE, run_to_end
from tests.server.harness import CHAT, chat

FULL = Path("/dev/full")


def run(program: str, *arguments: str) -> str:
    """What a program prints; it must end well."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    ended = run_to_end(sys.executable, "-c", textwrap.dedent(program), *arguments, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(not FULL.exists(), reason="this system has no file that is always full")
def test_fault_17_a_log_that_cannot_be_written_ends_nothing(tiny_model: Path) -> None:
    with FULL.open("w") as full:
        server = subprocess.Popen(
            [QUIRE, "serve", tiny_model, "--port", "0", *SMALL], stdout=full, stderr=full
        )
    try:
        url = f"http://127.0.0.1:{port_of(psutil.Process(server.pid))}"
        with httpx2.Client(base_url=url, timeout=END_LIMIT_S) as http:
            assert http.post(CHAT, json=chat(max_tokens=5)).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(END_LIMIT_S) == 0
    finally:
        server.kill()
        server.wait()


def test_fault_17_heaps_that_may_not_grow_are_weather() -> None:
    """The system refuses memory (EFBIG, and a signal that must not end the process); then it gives
    some again."""
    program = """
        import resource
        from tests.engines import SHAPE, VOCAB, Answers, greedy, recall_loop, run_dry
        from tests.recall import recall_many

        answers = Answers.empty()
        loop = recall_loop(answers)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        loop.mailbox.put(greedy(1, list(range(300)), 5))
        loop.mailbox.put(greedy(2, [1, 2, 3], 5))
        run_dry(loop)
        print(answers.finished[1].value, answers.messages[1])
        print(answers.finished[2].value, answers.messages[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        loop.mailbox.put(greedy(3, list(range(300)), 5))
        run_dry(loop)
        wanted = recall_many(list(range(300)), 5, len(SHAPE.layers), VOCAB)
        print(answers.finished[3].value, answers.tokens[3] == wanted)
        loop._kv.check_invariants()
    """
    assert run(program).splitlines() == [
        "error the system has no memory for it",
        "length None",
        "length True",
    ]


def test_fault_18_no_file_is_written_while_it_serves(tiny_model: Path) -> None:
    """Without prefixes on disk there is no spill: no temporary file that a crash could leave
    half-written, and no format that the next version would have to know."""
    program = """
        import os, signal, sys, threading
        import tests  # finds out where temporary files may be
        written = []

        def hook(event, arguments):
            if event == "open":
                path, _, flags = arguments
                # A number is a descriptor: its file, if it is one, has been opened by name.
                writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
                if isinstance(flags, int) and flags & writes and not isinstance(path, int):
                    written.append(str(path))
            elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate"):
                written.append(f"{event} {arguments}")

        sys.addaudithook(hook)
        from server.cli.serve import serve_model
        from server.cli.settings import read_settings

        # At its start it keeps its secret and what it knows of the model's files, and at its end
        # what steps cost.
        own = os.environ["XDG_STATE_HOME"], os.environ["XDG_CACHE_HOME"], "/dev/"

        def elsewhere():
            return [path for path in written if not any(place in path for place in own)]

        def ask():
            import httpx2, psutil
            from tests.abuse.processes import port_of
            from tests.server.harness import CHAT, chat
            url = f"http://127.0.0.1:{port_of(psutil.Process())}"
            print(elsewhere())
            written.clear()
            with httpx2.Client(base_url=url, timeout=30.0) as http:
                print(http.post(CHAT, json=chat(max_tokens=5)).status_code, written)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask).start()
        flags = {"server": {"port": 0}, "cache": {"kv_budget": "16MiB", "disk": 0}}
        serve_model(sys.argv[1], read_settings(None, flags))
        print(elsewhere(), flush=True)
        os._exit(0)
    """
    assert run(program, str(tiny_model)) == "[]\n200 []\n[]\n"
