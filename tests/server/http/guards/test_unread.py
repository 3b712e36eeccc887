"""What a body that nobody reads is waited for. tests/abuse/test_refusals.py has clients."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.config import Config
from server.http.guards import body as module
from server.http.guards.body import UnreadBody
from tests.abuse.test_refusals import LARGE


async def answered(headers: list[tuple[bytes, bytes]], pieces: list[Message]) -> list[Message]:
    """What is sent when an answer comes at once. pieces: what the client sends if it is asked."""
    sent: list[Message] = []
    incoming = iter(pieces)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def receive() -> Message:
        return next(incoming)

    async def send(message: Message) -> None:
        sent.append(message)

    await UnreadBody(app)({"type": "http", "headers": headers}, receive, send)
    return sent


def piece(size: int, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


async def test_the_answer_ends_when_the_body_does() -> None:
    pieces = [piece(5, True), piece(5, False)]
    sent = await answered([(b"content-length", b"10")], pieces)
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert b"".join(message.get("body", b"") for message in sent) == b"no"


async def test_who_leaves_or_sends_too_much_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 10)
    left: list[Message] = [{"type": "http.disconnect"}]
    for pieces in (left, [piece(5, True), piece(5, True)]):
        assert len(await answered([(b"transfer-encoding", b"chunked")], pieces)) == 3


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"0")], [(b"content-length", b"9"), (b"expect", b"x")]]
)
async def test_where_nothing_comes_nothing_is_waited_for(
    headers: list[tuple[bytes, bytes]],
) -> None:
    assert len(await answered(headers, [])) == 2


def test_the_settings_of_this_test_are_what_it_says() -> None:
    assert Config().limits.max_body_bytes < LARGE < module.MAX_UNREAD_BYTES
