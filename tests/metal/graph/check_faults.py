"""`quire serve` on a device that fails while it serves: what its clients are told, with what it
ends, what serves after that, and how the doctor lets it serve again."""

import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.abuse.processes import Process, serving
from tests.kvcache.test_gpu_failures import NAME
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
    assert "has failed here: serving failed" in run.stdout, "no load has been tried"
    assert len(list((tmp_path / "caches/quire").glob("fault-*"))) == 1
    run = subprocess.run(
        [*quire, "doctor", "--stress"],
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "had failed here, which is forgotten now: serving failed" in run.stdout
    assert run.stdout.rstrip().endswith("sparse on Metal can serve.")
    assert list((tmp_path / "caches/quire").glob("fault-*")) == []


# --- what Metal says of MLX's own commands ------------------------------------------------------

PLACES = ("first", "middle", "last")
# By Metal's words: the exit code, what clients are told, and what the next start says.
METALS = {
    f"Impacting Interactivity (0000000e:{NAME}ImpactingInteractivity)": (
        1, "takes shorter steps", r"held up the display.*AGX_RELAX_\w+=1.* steps are cut to 25 ms",
    ),
    f"Caused GPU Timeout Error (00000002:{NAME}Timeout)": (
        1, "takes shorter steps", r"took too long.*a closed lid.* steps are cut to 25 ms",
    ),
    f"Insufficient Memory (00000008:{NAME}OutOfMemory)": (
        1, "computes fewer tokens at a time", r"out of memory.* computes 1024 tokens at most",
    ),
    f"Ignored (for causing prior/excessive GPU errors) (00000004:{NAME}SubmissionsIgnored)": (
        1, "after an earlier failure", r"has failed here before \(the GPU refuses work",
    ),
    f"Caused GPU Address Fault Error (0000000b:{NAME}PageFault)": (
        4, "uses another KV backend", r"not sparse on Metal: .*PageFault",
    ),
}  # fmt: skip
EIGHT = (*SMALL[:-1], "8")


def streams_that_fail(server: Process, prompts: list[list[int]]) -> list[str]:
    """What streams say on a device that fails once all of them have begun."""

    def stream(prompt: list[int]) -> str:
        body = LONG | {"prompt": prompt, "stream": True}
        with httpx2.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S
        ) as response:
            lines = response.iter_lines()
            first = next(lines)
            begun.release()
            return "\n".join([first, *lines])

    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        for _ in prompts:
            assert begun.acquire(timeout=WAIT_S)
        server.send(signal.SIGUSR2)
        return [each.result() for each in streams]


@pytest.mark.parametrize("words", METALS)
def test_each_of_metals_errors_is_told_to_clients_and_heeded_by_the_next_start(
    words: str,
    quire: tuple[str, str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: list[str],
) -> None:
    code, told, heeded = METALS[words]
    ways = [(place, streams) for place in PLACES for streams in (1, 8)]
    for number, (place, streams) in enumerate([*ways, ("", 0)]):
        monkeypatch.setenv(METAL_ERROR, f"{place}:{words}")
        with serving(model, *EIGHT, quire=quire) as server:
            found = re.search(heeded, server.text)
            assert (found is not None) == (number > 0), server.text
            assert ("KV backend: paged" in server.text) == (code == 4 and number > 0)
            assert ask(server, max_tokens=3).status_code == 200, "nothing else is lost"
            for path in (tmp_path / "caches/quire").glob("*.json"):
                if path.name.startswith(("deaths-", "fault-")):
                    path.unlink()
            if not streams:
                server.send(signal.SIGTERM)
                assert server.wait() == 0
                break
            prompts = [[number + 1, other + 1, 7] for other in range(streams)]
            said = streams_that_fail(server, prompts)
            assert server.wait() == code
        for text in said:
            assert '"error"' in text
            assert told in text
            assert "[DONE]" not in text
    report.append(f"{words}: exit code {code}, {len(ways)} times, and then {found and found[0]}")


@pytest.mark.parametrize("words", [*METALS][:3])
def test_a_request_that_ends_the_engine_is_refused_before_it_does_so_a_fourth_time(
    words: str,
    quire: tuple[str, str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: list[str],
) -> None:
    monkeypatch.setenv(METAL_ERROR, f"first:{words}")
    prompts = [[number + 1, 5, 7] for number in range(7)]

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
            asked = [pool.submit(answer, prompt, tokens) for prompt in prompts]
            time.sleep(1.0)
            culprit = pool.submit(answer, [CULPRIT], tokens)
            statuses.append([each.result() for each in [*asked, culprit]])
            if start < 3:
                assert server.wait() == 1
                continue
            refused = ask(server, prompt=[CULPRIT])
            assert "it is refused (digest" in refused.text
            server.send(signal.SIGTERM)
            assert server.wait() == 0
    assert statuses[2][:-1] == [200] * 7, "alone, one after the other"
    assert statuses[3] == [200] * 7 + [500]
    report.append(f"{words.partition(' (0')[0]} by one of eight: {statuses}")
