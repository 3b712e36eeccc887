from types import SimpleNamespace

from starlette.requests import Request
from starlette.types import Message

from server.protocol.chat.request import ChatRequest
from server.routes.service import Service
from tests.server.harness import CHAT


async def test_a_body_that_comes_in_pieces_is_read_whole(service: Service) -> None:
    pieces = [b'{"messages": [{"role": "user", ', b'"content": "\xc3', b'\xa9"}]}', b""]
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": piece != b""} for piece in pieces
    ]
    incoming = iter(messages)

    async def receive() -> Message:
        return next(incoming)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "headers": headers, "route": SimpleNamespace(path=CHAT)}
    wire = await service.reader.read(Request(scope, receive), ChatRequest)
    assert wire.messages[0].content == "é"
