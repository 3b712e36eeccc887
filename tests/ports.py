"""A port for a program that takes its number."""

import socket
import sys

HOST = "127.0.0.1"


class HeldPort:
    """A free port that nobody else is given until it is closed.

    A program that may bind a port again that was in use (SO_REUSEADDR), as servers do, can listen
    there meanwhile, because nobody else does. That is so on Linux; elsewhere the port is free when
    it is chosen, and no more is known.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        if sys.platform == "linux":
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind((HOST, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        self._socket.close()
