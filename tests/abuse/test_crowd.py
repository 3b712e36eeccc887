import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.abuse.clients import chat_request, crowd
from tests.abuse.crowd import Outcome, outcome_of
from tests.abuse.processes import END_LIMIT_S, SMALL, serving
from tests.clients.servers import QUIRE

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
