"""`quire serve` on a device that fails while it serves: what its clients are told, with what it
ends, what serves after that, and how the doctor lets it serve again."""

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import httpx2
import pytest

from kvcache.backends.faults import GPUFailure
from tests.abuse.processes import serving
from tests.clients.servers import Process
from tests.kvcache.backends.test_gpu_failures import TEXTS
from tests.metal.graph.check_engine import SPEC
from tests.metal.graph.program import (
    CULPRIT,
    DRIVERS_WORDS,
    INTERPRETER,
    METAL_ERROR,
    interpreter,
)
from tests.models import write_model

WAIT_S = 60.0
# The limit of a test is 300 s (pyproject.toml).
DOCTOR_S = 240.0
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


def streamed(server: Process, begun: Callable[[], None], **more: object) -> str:
    """What a stream says. ``begun`` is called at the first words."""
    body = LONG | {"stream": True} | more
    with httpx2.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        begun()
        return "\n".join([first, *lines])


def stream_that_fails(server: Process, how: signal.Signals) -> str:
    """What a stream says on a device that fails: at its first words; or before anything runs, so
    that the next command is one of quire's own."""
    if how is signal.SIGUSR2:
        server.send(how)
        return streamed(server, lambda: None)
    return streamed(server, lambda: server.send(how))


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


@pytest.mark.parametrize(
    ("flags", "told", "kept"),
    [
        ([], "has failed here: serving failed", 1),  # no load has been tried
        (["--stress"], "had failed here, which is forgotten now: serving failed", 0),
    ],
    ids=["without-load", "stress"],
)
def test_the_doctor_tries_again_and_forgets_what_it_has_tried(
    flags: list[str], told: str, kept: int, quire: tuple[str, str], model: Path, tmp_path: Path
) -> None:
    def faults() -> int:
        return len(list((tmp_path / "caches/quire").glob("fault-*")))

    with serving(model, *SMALL, quire=quire) as server:
        stream_that_fails(server, signal.SIGUSR1)
        assert server.wait() == 4
    assert faults() == 1
    run = subprocess.run(
        [*quire, "doctor", *flags], capture_output=True, text=True, timeout=DOCTOR_S, check=False
    )
    assert told in run.stdout
    assert faults() == kept
    if not kept:
        assert run.returncode == 0, run.stdout
        assert run.stdout.rstrip().endswith("sparse on Metal can serve.")


# --- what Metal says of MLX's own commands ------------------------------------------------------

METALS = {failure: words for words, failure in reversed(TEXTS.items()) if failure is not None}
# What the next start says.
HEEDED = {
    GPUFailure.INTERACTIVITY: r"held up the display; AGX_\w+=1.* cut to 25 ms and 2048 tokens",
    GPUFailure.TIMEOUT: r"took too long; .*a closed lid.* cut to 25 ms and 2048 tokens",
    GPUFailure.OUT_OF_MEMORY: r"out of memory.* cut to 100 ms and 1024 tokens",
    GPUFailure.IGNORED: r"the GPU refuses work .* cut to 100 ms and 2048 tokens",
    GPUFailure.KV_MEMORY: r"not sparse on Metal: .*PageFault",
}
EIGHT = (*SMALL[:-1], "8")
# At which place of a step, and with how many streams. By night all.
PLACES = ("first", "middle", "last")
BY_DAY = {
    GPUFailure.INTERACTIVITY: ("first", 1),
    GPUFailure.TIMEOUT: ("last", 8),
    GPUFailure.OUT_OF_MEMORY: ("middle", 8),
    GPUFailure.IGNORED: ("first", 8),
    GPUFailure.KV_MEMORY: ("last", 1),
}
WAYS = [
    pytest.param(
        failure, *way, id=f"{failure.name}-{way[0]}-{way[1]}" + "-nightly" * (way != by_day)
    )
    for failure, by_day in BY_DAY.items()
    for way in product(PLACES, (1, 8))
]


def streams_that_fail(server: Process, prompts: list[list[int]]) -> list[str]:
    """What streams say on a device that fails once all of them have begun."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(streamed, server, begun.release, prompt=each) for each in prompts]
        for _ in prompts:
            assert begun.acquire(timeout=WAIT_S)
        server.send(signal.SIGUSR2)
        return [each.result() for each in streams]


@pytest.mark.parametrize(("failure", "place", "streams"), WAYS)
def test_each_of_metals_errors_is_told_to_clients_and_heeded_by_the_next_start(
    failure: GPUFailure,
    place: str,
    streams: int,
    quire: tuple[str, str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: list[str],
) -> None:
    code = 4 if failure is GPUFailure.KV_MEMORY else 1
    monkeypatch.setenv(METAL_ERROR, f"{place}:{METALS[failure]}")
    with serving(model, *EIGHT, quire=quire) as server:
        assert "KV backend: sparse" in server.text
        texts = streams_that_fail(server, [[n + 1, 5, 7] for n in range(streams)])
        assert server.wait() == code
    for text in texts:
        assert '"error"' in text
        assert failure.advice in text
        assert "[DONE]" not in text
    with serving(model, *EIGHT, quire=quire) as server:
        heeded = re.search(HEEDED[failure], server.text)
        assert heeded, server.text
        assert ("KV backend: paged" in server.text) == (code == 4)
        assert ask(server, max_tokens=3).status_code == 200, "nothing else is lost"
    report.append(f"{failure.name}, {place}, {streams}: exit code {code}, then {heeded[0]}")


@pytest.mark.parametrize(
    "failure",
    [
        GPUFailure.OUT_OF_MEMORY,
        pytest.param(GPUFailure.INTERACTIVITY, id="INTERACTIVITY-nightly"),
    ],
)
def test_a_request_that_ends_the_engine_is_refused_before_it_does_so_a_fourth_time(
    failure: GPUFailure,
    quire: tuple[str, str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: list[str],
) -> None:
    monkeypatch.setenv(METAL_ERROR, f"first:{METALS[failure]}")

    def answer(prompt: list[int], tokens: int) -> int | None:
        try:
            return ask(server, prompt=prompt, max_tokens=tokens).status_code
        except httpx2.TransportError:
            return None

    statuses = []
    for start in range(4):
        with (
            serving(model, *EIGHT, quire=quire) as server,
            ThreadPoolExecutor(8) as pool,
        ):
            # At first the others still run when the one that fails comes.
            tokens = 400 if start < 2 else 3
            asked = [pool.submit(answer, [number, 5, 7], tokens) for number in range(1, 8)]
            time.sleep(1.0)
            culprit = pool.submit(answer, [CULPRIT], tokens)
            statuses.append([each.result() for each in [*asked, culprit]])
            if start < 3:
                assert server.wait() == 1
            else:
                assert "it is refused (digest" in ask(server, prompt=[CULPRIT]).text
    assert statuses[2][:-1] == [200] * 7, "alone, one after the other"
    assert statuses[3] == [200] * 7 + [500]
    report.append(f"{failure.name} by one of eight: {statuses}")
