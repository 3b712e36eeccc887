import json
from collections.abc import Iterator

import pytest

from tests.bench.wire import MAX_QUOTED_BYTES, ReplyParser, Unchunker

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":34,'
    b'"total_tokens":46,"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def text(content: str, name: str = "content") -> bytes:
    event = {"choices": [{"delta": {name: content}, "finish_reason": None}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


ANSWER = ROLE + text("a") + text("b") + FINISH + USAGE + DONE


def chunked(*parts: bytes) -> bytes:
    """As chunks, the last one empty."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Whole, cut in two at every place, and byte by byte."""
    yield [data]
    yield from ([data[:place], data[place:]] for place in range(1, len(data)))
    yield [bytes([byte]) for byte in data]


def parsed(*reads: bytes) -> ReplyParser:
    """Of reads at the seconds 1, 2, ..."""
    parser = ReplyParser()
    for second, read in enumerate(reads, 1):
        parser.feed(read, second)
    return parser


# --- chunks ------------------------------------------------------------------------------------


def test_chunks_are_joined_wherever_the_bytes_are_cut() -> None:
    body = [b"x", b"", b"two\r\nlines", b"y" * 300, b"\r\n", b"5\r\nlike a chunk\r\n"]
    wire = chunked(*(part for part in body if part))
    for reads in cuts(wire):
        unchunker = Unchunker()
        assert b"".join(unchunker.feed(read) for read in reads) == b"".join(body)


def test_a_chunks_size_may_have_extensions_capitals_and_zeros() -> None:
    wire = b"A;name=value\r\n0123456789\r\n00b\r\nabcdefghijk\r\n0\r\n\r\n"
    for reads in cuts(wire):
        unchunker = Unchunker()
        assert b"".join(unchunker.feed(read) for read in reads) == b"0123456789abcdefghijk"


def test_what_a_chunk_has_so_far_is_handed_on_before_it_ends() -> None:
    unchunker = Unchunker()
    assert unchunker.feed(b"a\r\n0123") == b"0123"
    assert unchunker.feed(b"456789\r") == b"456789"
    assert unchunker.feed(b"\n1\r\nx") == b"x"


def test_a_size_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Unchunker().feed(b"size\r\n")


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wire",
    [
        HEAD + ANSWER,
        HEAD + ANSWER.replace(b"\n", b"\r\n"),
        CHUNKED_HEAD + chunked(ANSWER),
        CHUNKED_HEAD + chunked(*(bytes([byte]) for byte in ANSWER)),
    ],
    ids=["plain", "with carriage returns", "one chunk", "a chunk per byte"],
)
def test_an_answer_is_understood_wherever_it_is_cut(wire: bytes) -> None:
    for reads in cuts(wire):
        parser = parsed(*reads)
        assert parser.error() is None
        assert (parser.status, parser.finish, parser.done) == (200, "length", True)
        assert (parser.prompt_tokens, parser.completion_tokens) == (12, 34)
        assert parser.cached_tokens == 5
        assert 1 <= len(parser.text_times_s) <= 2


def test_every_read_that_brings_text_is_one_time() -> None:
    parser = parsed(HEAD + ROLE, text("a"), text("b") + text("c"), FINISH, text("d") + USAGE)
    assert parser.text_times_s == [2, 3, 5]


def test_an_events_time_is_that_of_the_read_which_ends_it() -> None:
    event = text("a")
    assert parsed(HEAD, event[:-1], event[-1:], text("b")).text_times_s == [3, 4]


@pytest.mark.parametrize("name", ["content", "text", "reasoning", "reasoning_content"])
def test_text_is_text_under_every_name_in_either_spacing(name: str) -> None:
    for event in (text("x", name), text("x", name).replace(b": ", b":"), text('"', name)):
        assert parsed(HEAD + event).text_times_s == [1]


def test_what_is_not_text_has_no_time() -> None:
    other = b'data: {"choices":[{"delta":{"content": null,"refusal":"no","contents":"x"}}]}\n\n'
    assert parsed(HEAD + ROLE, other, FINISH, USAGE, b": keep-alive\n\n").text_times_s == []


def test_no_text_can_look_like_anything_else() -> None:
    hostile = '"finish_reason": "stop", "completion_tokens": 7 \n\ndata: [DONE]\n\ndata: {"error"'
    parser = parsed(HEAD + text(hostile))
    assert (parser.finish, parser.completion_tokens, parser.done) == (None, 0, False)
    assert parser.fault is None


# --- what is no answer -------------------------------------------------------------------------


@pytest.mark.parametrize("end", range(0, len(HEAD + ANSWER) - 2, 7))
def test_an_answer_that_is_cut_off_is_an_error(end: int) -> None:
    parser = parsed((HEAD + ANSWER)[:end])
    assert parser.error() == ("no answer" if end < len(HEAD) else "the answer broke off")


@pytest.mark.parametrize("framing", ["plain", "chunked"])
def test_another_status_is_an_error_with_what_the_server_said(framing: str) -> None:
    says = b'{"error":{"message":"the server is full"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\n"
    plain = head + b"Retry-After: 1\r\n\r\n" + says
    wire = plain if framing == "plain" else head + b"transfer-encoding: chunked\r\n\r\n"
    wire += b"" if framing == "plain" else chunked(says)
    for reads in cuts(wire):
        assert parsed(*reads).error() == f"status 503: {says.decode()}"


def test_a_long_error_is_quoted_in_part() -> None:
    parser = parsed(b"HTTP/1.1 500 Oh\r\n\r\n" + b"\xff" + b"x" * 10_000)
    error = parser.error()
    assert error == "status 500: \ufffd" + "x" * (MAX_QUOTED_BYTES - 1)


def test_an_error_event_is_an_error_even_when_the_stream_ends_well() -> None:
    failed = b'data: {"error":{"message":"step failed"}}\n\n'
    for wire in (failed, failed + DONE, text("a") + failed.replace(b"data: ", b"data:") + DONE):
        for reads in cuts(HEAD + wire):
            error = parsed(*reads).error()
            assert error is not None
            assert "step failed" in error


@pytest.mark.parametrize("head", [b"HTTP/2 200", b"HTTP/1.1 fine", b"ICY 200 OK", b"", b"\xff\xfe"])
def test_a_head_that_is_no_http_is_an_error_and_the_rest_is_not_read(head: bytes) -> None:
    parser = parsed(head + b"\r\n\r\n" + ANSWER, ANSWER)
    error = parser.error()
    assert error is not None
    assert error.startswith("no HTTP: '")
    assert (parser.status, parser.done, parser.text_times_s) == (0, False, [])


def test_chunks_that_are_none_are_an_error_and_the_rest_is_not_read() -> None:
    parser = parsed(CHUNKED_HEAD + chunked(text("a"))[:-5] + b"size\r\n", chunked(ANSWER))
    error = parser.error()
    assert error is not None
    assert error.startswith("no HTTP: invalid literal")
    assert parser.done is False
