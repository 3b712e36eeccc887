"""`quire serve` on a device that fails while it serves: what its clients are told, with what it
ends, what serves after that, and how the doctor lets it serve again."""

import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.abuse.processes import Process, serving
from tests.metal.graph.check_engine import SPEC
from tests.metal.graph.program import DRIVERS_WORDS, INTERPRETER, interpreter
from tests.models import write_model

WAIT_S = 60.0
DOCTOR_S = 600.0
SMALL = ("--kv-budget", "32MiB", "--heap-size", "1MiB", "--max-num-seqs", "4")
# More than is mapped ahead of anybody.
LONG = {"prompt": "a b c", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
FAILS = {
    # Who sees it first is a matter of chance.
    signal.SIGUSR1: r"took over 3 s|did not finish within 3000 ms: \d+ mapping operations",
    signal.SIGUSR2: DRIVERS_WORDS,
}


@pytest.fixture
def quire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The command, of a user who has no caches yet."""
    command = str(interpreter(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv(INTERPRETER, command)
    return (command, "quire")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", SPEC, seed=5)


def ask(server: Process, **more: object) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/completions", json=LONG | more, timeout=WAIT_S)


def refusal(server: Process) -> int | None:
    """The status of an answer that is an error; None where nobody listens any more."""
    try:
        answer = ask(server)
    except httpx2.ConnectError:
        return None
    assert "error" in answer.json()
    return answer.status_code


def stream_that_fails(server: Process, how: signal.Signals) -> str:
    """What a stream says on a device that fails: at its first words; or before anything runs, so
    that the next command is one of quire's own."""
    if how is signal.SIGUSR2:
        server.send(how)
    with httpx2.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=WAIT_S
    ) as response:
        lines = response.iter_lines()
        said = next(lines)
        if how is not signal.SIGUSR2:
            server.send(how)
        return "\n".join([said, *lines])


@pytest.mark.parametrize("how", FAILS)
def test_a_mapping_that_fails_while_serving_is_not_met_twice(
    how: signal.Signals, quire: tuple[str, str], model: Path, report: list[str]
) -> None:
    with (
        serving(model, *SMALL, quire=quire) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        assert "KV backend: sparse on Metal" in server.text
        streaming = pool.submit(stream_that_fails, server, how)
        time.sleep(0.05)
        status = refusal(server)
        streamed = streaming.result()
        code = server.wait()
    assert '"error"' in streamed
    assert "[DONE]" not in streamed
    # Who came before the engine's end gets 500, who came after it 503, or finds no server.
    assert status in (500, 503, None)
    assert code == 4
    assert re.search(FAILS[how], server.text)
    assert "from the next start on something else serves" in server.text

    with serving(model, *SMALL, quire=quire) as server:
        (warning,) = re.findall(r"not sparse on Metal: .*", server.text)
        assert "serving failed" in warning
        assert re.search(FAILS[how], warning)
        assert "KV backend: paged on Metal" in server.text
        assert ask(server, max_tokens=40).status_code == 200
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    report.append(f"a device that fails while serving: exit code {code}, then: {warning}")

    run = subprocess.run(
        [*quire, "serve", str(model), "--port", "0", "--kv-backend", "sparse"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "sparse on Metal is asked for, but it has failed on this machine" in run.stderr


def test_the_doctor_tries_again_and_forgets(
    quire: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    with serving(model, *SMALL, quire=quire) as server:
        stream_that_fails(server, signal.SIGUSR1)
        assert server.wait() == 4
    assert len(list((tmp_path / "caches/quire").glob("fault-*"))) == 1
    run = subprocess.run(
        [*quire, "doctor"], capture_output=True, text=True, timeout=DOCTOR_S, check=False
    )
    assert run.returncode == 0, run.stdout
    assert "had failed here, which is forgotten now: serving failed" in run.stdout
    assert run.stdout.rstrip().endswith("sparse on Metal can serve.")
    assert list((tmp_path / "caches/quire").glob("fault-*")) == []
