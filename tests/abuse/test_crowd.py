import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.abuse.clients import Ending, chat_request, crowd
from tests.abuse.crowd import Outcome, judge, outcome_of
from tests.abuse.processes import END_LIMIT_S, SMALL, serving
from tests.clients.servers import QUIRE


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"usage": 1}', "answered"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"id', "cut in the middle"),
        (b"HTTP/1.1 429 Too Many\r\nRetry-After: 1\r\n\r\n", "429 with Retry-After"),
        (b"HTTP/1.1 503 No\r\n\r\n", "503 without a time"),
        (b"HTTP/1.1 500 No\r\n\r\n", "status 500"),
        (b"", "closed without a word"),
    ],
)
def test_an_ending_is_told_in_a_few_words(received: bytes, outcome: str) -> None:
    assert outcome_of(Ending(received, 1.0)) == outcome
    assert outcome_of(Ending(received, 1.0, open_still=True)) == "left hanging"


GOOD = Outcome(Counter({"answered": 1, "429 with Retry-After": 2}), 20.0, 40.0, 1.0)
SLOW = replace(GOOD, crowded_gap_ms=41.0)
LOST = replace(SLOW, outcomes=Counter({"left hanging": 1}))


def test_a_crowd_with_an_unknown_end_or_slow_streams_is_a_problem() -> None:
    assert GOOD.problems() == []
    assert len(SLOW.problems()) == 1
    assert len(LOST.problems()) == 3
    assert not replace(SLOW, streams=4).problems()
    assert not replace(SLOW, calm_gap_ms=2.0, crowded_gap_ms=29.0).problems()


async def test_fault_24_a_system_with_few_descriptors_serves_some_and_says_how_many(
    tiny_model: Path,
) -> None:
    few = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", QUIRE)
    with serving(tiny_model, *SMALL, quire=few) as server:
        assert "the system allows open files for 16 only: raise `ulimit -n`" in server.text
        asked = chat_request(max_tokens=4).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        port = int(server.url.rpartition(":")[2])
        for _ in range(5):
            endings = await crowd(port, 16, asked, END_LIMIT_S)
            assert Counter(map(outcome_of, endings)) == {"answered": 16}
        server.send(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("outcomes", "code", "runs"),
    [([GOOD], 0, 1), ([SLOW, GOOD], 0, 2), ([SLOW, SLOW, SLOW], 1, 3), ([LOST], 1, 1)],
)
def test_streams_that_were_only_slow_get_another_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcomes: list[Outcome],
    code: int,
    runs: int,
) -> None:
    left = iter(outcomes)
    monkeypatch.setattr("tests.abuse.crowd.run", lambda *_, **__: next(left))
    assert judge(Path(), 3, 16) == code
    assert capsys.readouterr().out.count("ratio") == runs
