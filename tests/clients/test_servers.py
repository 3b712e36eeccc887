"""The clients' servers end with what they were started for."""

import signal
import sys
from urllib.request import urlopen

import pytest

from tests.clients.servers import ServerError, random_server, serving


def test_a_server_ends_when_its_block_fails() -> None:
    program = "import time; print('serving x on http://127.0.0.1:1', flush=True); time.sleep(99)"
    with (
        pytest.raises(ZeroDivisionError),
        serving(sys.executable, "-c", program) as (address, process),
    ):
        raise ZeroDivisionError
    assert address == "http://127.0.0.1:1"
    assert process.returncode == -signal.SIGTERM, "it lived until then"


@pytest.mark.parametrize(
    "program", ["raise SystemExit('no port')", "print('serving x on http://127.0.0.1:1 no port')"]
)
def test_a_server_that_ended_by_itself_is_told_with_its_log(program: str) -> None:
    with (
        pytest.raises(ServerError, match="no port"),
        serving(sys.executable, "-c", program) as (_, process),
    ):
        process.wait()


def test_random_weights_are_served() -> None:
    with random_server() as address, urlopen(f"{address}/ready") as answer:
        assert answer.status == 200
