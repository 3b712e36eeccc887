"""Every row of the table, for each of its APIs, streamed and whole."""

import json

import pytest

from tests.api import (
    blocks,
    calls,
    conversations,
    forms,
    harmony_rows,
    items,
    parameters,
    texts,
    thoughts,
)
from tests.api.conftest import Server
from tests.api.table import (
    ALL,
    COMPLETIONS,
    FOUR,
    OPENAIS,
    SAMPLING,
    Behaviour,
    Refusal,
    list_behaviours,
    list_refusals,
)
from tests.api.wire import Api, Ask

SUBJECTS = (texts, thoughts, calls, forms, conversations, parameters)
BEHAVIOURS = [row for subject in (*SUBJECTS, blocks, items) for row in subject.BEHAVIOURS]
REFUSALS = [row for subject in SUBJECTS for row in subject.REFUSALS]
NO_OBJECTS = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"model": "\\ud800"}',
    b'{"\\udfff": 1}',
    b'{"model": "\xff"}',
    b'{"model": "\xed\xa0\x80"}',
    b'{"n": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe{\x00}\x00",
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(("row", "api", "streamed"), list_behaviours(BEHAVIOURS))
async def test_what_comes_back_is_what_was_wanted(
    server: Server, row: Behaviour, api: Api, streamed: bool
) -> None:
    await compare(server, row, api, streamed=streamed)


@pytest.mark.parametrize(("row", "api", "streamed"), list_behaviours(harmony_rows.BEHAVIOURS))
async def test_a_model_that_writes_channels_is_read_as_one(
    harmony: Server, row: Behaviour, api: Api, streamed: bool
) -> None:
    await compare(harmony, row, api, streamed=streamed)


async def compare(server: Server, row: Behaviour, api: Api, *, streamed: bool) -> None:
    """Ask, and compare what comes back and what the engine has heard with the row."""
    response = await server.check(api, row, streamed=streamed)
    (request,) = server.heard
    if row.prompt is not None:
        assert server.read_prompt(request) == row.prompt
    values = {name: getattr(request, name, None) for name in row.heard}
    params = request.params[0]
    values |= {name: getattr(params, name) for name in row.heard if hasattr(params, name)}
    assert values == row.heard
    assert row.held in (None, request.constraint is not None)
    assert {name: response.headers.get(name) for name in row.headers} == dict(row.headers)


@pytest.mark.parametrize(("row", "api"), list_refusals(REFUSALS))
async def test_what_is_refused_is_named(server: Server, row: Refusal, api: Api) -> None:
    await check_refused(server, row, api)


@pytest.mark.parametrize(("row", "api"), list_refusals(harmony_rows.REFUSALS))
async def test_what_a_model_of_channels_refuses_is_named(
    harmony: Server, row: Refusal, api: Api
) -> None:
    await check_refused(harmony, row, api)


async def check_refused(server: Server, row: Refusal, api: Api) -> None:
    kind = {400: "invalid_request_error", 404: "not_found_error"}[row.status]
    for body, param in row.write_bodies(api):
        for wanted in (body, api.with_stream(body)):
            content = json.dumps(wanted).encode("utf-8", "surrogatepass")
            response = await server.http.post(api.path, content=content)
            assert response.status_code == row.status, (wanted, response.text)
            error = api.read_error(response)
            assert error.kind in (kind, "")
            assert error.names(param), (wanted, error)
            assert row.message in error.message
            assert 0 < len(error.message) < 1000
            assert "zebra" not in error.message, "an error never repeats its input"
    assert server.heard == []


@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_a_body_that_is_no_object_of_json_is_refused(server: Server, api: Api) -> None:
    for content in NO_OBJECTS:
        response = await server.http.post(api.path, content=content)
        error = api.read_error(response)
        assert (error.status, error.kind) in ((400, "invalid_request_error"), (400, ""))
    assert server.heard == []


@pytest.mark.parametrize("api", ALL, ids=repr)
async def test_of_a_field_that_comes_twice_the_last_one_counts(server: Server, api: Api) -> None:
    start = json.dumps(api.write(Ask()) | {"priority": 0, "cache_salt": "a"})[:-1]
    response = await server.http.post(api.path, content=start + ', "cache_salt": 5}')
    assert api.read_error(response).names("cache_salt")
    response = await server.http.post(
        api.path, content=start + ', "cache_salt": 5, "cache_salt": "b"}'
    )
    assert response.status_code == 200


@pytest.mark.parametrize("api", SAMPLING, ids=repr)
@pytest.mark.parametrize("number", ["1e400", "-1e400"])
async def test_a_number_beyond_all_numbers_is_named(server: Server, api: Api, number: str) -> None:
    body = json.dumps(api.write(Ask())).replace('"temperature": 0', f'"temperature": {number}')
    response = await server.http.post(api.path, content=body)
    assert (response.status_code, api.read_error(response).names("temperature")) == (400, True)


@pytest.mark.parametrize("api", [*OPENAIS, COMPLETIONS], ids=repr)
async def test_options_of_a_stream_need_one(server: Server, api: Api) -> None:
    for stream in (None, False):
        for options in ({}, {"include_usage": True}):
            body = api.write(Ask()) | {"stream": stream, "stream_options": options}
            response = await server.post(api, body)
            assert response.status_code == 400
            assert api.read_error(response).names("stream_options")


@pytest.mark.parametrize("api", FOUR, ids=repr)
async def test_wherever_an_answer_is_cut_off_a_stream_says_the_same(
    server: Server, api: Api
) -> None:
    server.says("<think>\nHm.\n</think>\n\nGrüße 😀")
    for length in range(1, 30):
        body = api.write(Ask(length=length))
        first, _ = await server.ask(api, body)
        second, _ = await server.ask(api, api.with_stream(body), streamed=True)
        first.ids = second.ids
        assert first == second
        assert first.tokens == min(length, 22)


async def test_two_answers_have_two_names(server: Server) -> None:
    names = [(await server.ask(api, api.write(Ask(length=1))))[0].ids for api in FOUR * 2]
    flat = [name for one in names for name in one]
    assert len(set(flat)) == len(flat)
