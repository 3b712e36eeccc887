import signal
from collections import Counter
from pathlib import Path

from tests.abuse.clients import chat_request, crowd
from tests.abuse.crowd import outcome_of
from tests.abuse.processes import END_LIMIT_S, SMALL, serving
from tests.clients.servers import QUIRE


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
