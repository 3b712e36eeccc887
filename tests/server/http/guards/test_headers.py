from starlette.types import Message, Receive, Scope, Send

from server.http.guards.headers import SAFE_HEADERS, SafeHeaders


async def sent(*messages: Message, kind: str = "http") -> list[Message]:
    found: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async def send(message: Message) -> None:
        found.append(message)

    async def receive() -> Message:
        raise AssertionError

    await SafeHeaders(app)({"type": kind}, receive, send)
    return found


async def test_every_answer_gets_them_and_its_own_win() -> None:
    own = {"type": "http.response.start", "headers": [(b"cache-control", b"no-cache")]}
    body = {"type": "http.response.body", "body": b"x"}
    start, after = await sent(own, body)
    headers = dict(start["headers"])
    assert headers[b"cache-control"] == b"no-cache"
    assert len(headers) == len(SAFE_HEADERS)
    assert after == body
    (bare,) = await sent({"type": "http.response.start"})
    assert len(bare["headers"]) == len(SAFE_HEADERS)


async def test_what_is_no_answer_is_let_pass() -> None:
    message = {"type": "http.response.start", "headers": []}
    assert await sent(message, kind="lifespan") == [message]
