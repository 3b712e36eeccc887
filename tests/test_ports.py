"""A port that is held for somebody."""

import socket
import sys

import pytest

from tests.ports import HOST, HeldPort


@pytest.mark.skipif(sys.platform != "linux", reason="other systems hold no port for somebody else")
def test_a_port_is_held_for_who_listens_there_and_for_nobody_else() -> None:
    held = HeldPort()
    with socket.socket() as careless, pytest.raises(OSError, match="in use"):
        careless.bind((HOST, held.number))
    with (
        socket.create_server((HOST, held.number)) as server,
        socket.create_connection((HOST, held.number)) as client,
    ):
        connection, address = server.accept()
        connection.close()
        assert address == client.getsockname()
    held.close()
    held.close()
