"""The programs of this folder, each run briefly: costs, crowd, soak."""

import signal
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import AsyncMock

import psutil
import pytest

from tests.abuse import clients
from tests.abuse.clients import Ending, chat_request, crowd
from tests.abuse.costs import Cost, main, problems
from tests.abuse.crowd import outcome_of
from tests.abuse.limit_rows import COMPLETIONS
from tests.abuse.processes import END_LIMIT_S, SMALL, serving
from tests.abuse.soak import DEMO, RECEIVE_S, Soak, soak
from tests.clients.servers import QUIRE
from tests.fuzz.judgement import MIB


async def test_fault_24_a_system_with_few_descriptors_serves_some_and_says_how_many(
    tiny_model: Path,
) -> None:
    few = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", QUIRE)
    with serving(tiny_model, *SMALL, quire=few) as server:
        assert "the system allows open files for 16 only: raise `ulimit -n`" in server.text
        asked = chat_request(max_tokens=4).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        for _ in range(5):
            endings = await crowd(server.port, 16, asked, END_LIMIT_S)
            assert Counter(map(outcome_of, endings)) == {"answered": 16}
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def test_rude_clients_leave_nothing_behind() -> None:
    run = soak(DEMO, minutes=0.0, seed=1)
    assert run.problems == [], run.report()
    assert any(what.startswith("honest: 200") for what in run.outcomes), run.report()
    assert len(run.outcomes) > 4, run.report()


def test_honest_clients_leave_nothing_behind_and_copy_nothing() -> None:
    run = soak(DEMO, minutes=0.0, seed=1, requests=60)
    assert run.problems == [], run.report()
    assert set(run.outcomes) == {"honest: 200", "honest: open"}, run.report()
    assert run.outcomes.total() == 60


@pytest.mark.parametrize("received", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
@pytest.mark.parametrize("sent_s", [0.0, 0.9, 1.1, 1.4, 5.0])
async def test_a_sample_that_the_program_itself_asks_for_late_is_none(
    monkeypatch: pytest.MonkeyPatch, received: bytes, sent_s: float
) -> None:
    closed = AsyncMock(return_value=Ending(received, seconds=sent_s, sent_s=sent_s))
    monkeypatch.setattr(clients, "one_of_many", closed)
    run = Soak(port=0, process=psutil.Process(), random=Random(1), requests=1)
    with nullcontext() if sent_s > RECEIVE_S else pytest.raises(ConnectionError):
        await run._sample()
    assert run.samples == []


HALF = Cost(5, 5000, 200, b"a", 1.0, 1.0, 40 * MIB, 0.0)
WHOLE = replace(HALF, cpu_s=2.9, peak_bytes=119 * MIB)
BEYOND = Cost(11, 10_001, 400, b"b", 0.01, 0.01, 0, 0.0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"cpu_s": 3.1}, ["TIME GROWS"]),
        ({"peak_bytes": 121 * MIB, "body_bytes": 2 * MIB}, ["MEMORY GROWS"]),
        ({"body_bytes": MIB}, ["MUCH MEMORY"]),
        ({"status": 500}, ["SERVER ERROR"]),
        ({"status": 400, "said": b"b"}, ["NOT REFUSED"]),
        ({"status": None}, ["NO ANSWER"]),
    ],
)
def test_what_grows_too_fast_or_takes_too_much_is_found(
    changes: dict[str, object], found: list[str]
) -> None:
    whole = replace(WHOLE, body_bytes=2 * MIB)
    assert problems([HALF, replace(whole, **changes), BEYOND], 400) == [  # type: ignore[arg-type]
        *found
    ]


def test_a_row_is_measured_on_a_real_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["costs", "--only", f"max_prompts {COMPLETIONS}"])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"max_prompts {COMPLETIONS} " in said
    assert "200 200 400" in said
    assert "1 rows, 0 with findings" in said
