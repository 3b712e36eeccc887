from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import Message

from engine.client import EngineClient, TokenStream
from engine.errors import EngineDeadError, QueueFullError
from engine.types import EngineStats, FinishReason, SamplingParams, TokenEvent
from server.chat.generation import Prompt
from server.chat.service import ServedModel, Service, new_seed, parse
from server.config import Config, ServerSection
from server.protocol.chat.request import ChatRequest
from server.protocol.wire_errors import ApiError
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import CHAT, MODEL, OTHER_NAMES, make_service, start_engine
from tests.server.streams import Batches, PreparedClient, PreparedStream, fault, token

IMPATIENT = Config(server=ServerSection(ready_timeout_s=1e-9))
SILENCE: Batches = [[]] * 3


def around(service: Service, client: PreparedClient, config: Config | None = None) -> Service:
    return replace(service, client=cast(EngineClient, client), config=config or service.config)


# --- what requests are checked against -------------------------------------------------------


def test_a_model_has_one_id_and_several_names(service: Service) -> None:
    assert service.model.id == MODEL
    for name in (None, MODEL, *OTHER_NAMES):
        service.check_model(name)
    for name in ("", "/", "RECALL", MODEL + " "):
        with pytest.raises(ApiError) as caught:
            service.check_model(name)
        assert (caught.value.status, caught.value.param) == (404, "model")


@pytest.mark.parametrize(
    ("names", "asked", "ours"),
    [
        (("alias",), "org/alias", True),
        (("alias",), "/some/where/alias/", True),
        (("alias",), "alias/", True),
        (("alias",), "alias/other", False),
        (("alias",), "lias", False),
        (("org/name",), "name", True),
        (("org/name",), "org/name/", True),
        (("org/name",), "other/name", False),
        (("org/name",), "org", False),
        (("./models/name/",), "./models/name", True),
        (("./models/name/",), "name", True),
        (("/models/name",), "models/name", False),
        (("name", "/models/name"), "models/name", True),
        (("/",), "/", False),
    ],
)
def test_a_name_may_have_its_owner_or_not(names: tuple[str, ...], asked: str, ours: bool) -> None:
    assert ServedModel(names, {}, frozenset()).is_called(asked) is ours


def test_a_model_knows_when_it_was_first_served() -> None:
    before = ServedModel(("a",), {}, frozenset())
    assert 0 < before.created <= ServedModel(("b",), {}, frozenset()).created


def test_every_answer_has_a_name_of_its_own(service: Service) -> None:
    names = {service.new_metadata("cmpl").id for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("cmpl-") for name in names)
    assert service.new_metadata("msg", "_").id.startswith("msg_")


def test_token_ids_are_those_of_the_model(service: Service) -> None:
    service.check_token_ids([], "tokens")
    service.check_token_ids([0, VOCAB - 1], "tokens")
    with pytest.raises(ApiError) as caught:
        service.check_token_ids([0, VOCAB], "tokens")
    assert (caught.value.status, caught.value.param) == (400, "tokens")


def test_a_prompt_needs_a_token_and_leaves_room_for_one(service: Service) -> None:
    most = service.max_model_len - 1
    service.check_prompt((1,) * most, "prompt")
    for ids in ((), (1,) * (most + 1)):
        with pytest.raises(ApiError) as caught:
            service.check_prompt(ids, "prompt")
        assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("refusal", "status"), [(QueueFullError(), 429), (EngineDeadError(), 503)], ids=str
)
def test_what_fills_up_or_ends_while_a_prompt_is_encoded_is_refused_as_well(
    service: Service, refusal: Exception, status: int
) -> None:
    class Refusing(PreparedClient):
        def submit_choices(self, *_: Any, **__: Any) -> Sequence[PreparedStream]:
            raise refusal

    prompt = Prompt((1,), SamplingParams(max_tokens=1))
    with pytest.raises(ApiError) as caught:
        around(service, Refusing([])).start(prompt)
    assert caught.value.status == status


def test_answers_that_never_fit_are_refused_and_those_that_do_not_now_are_put_off(
    tokenizer: Tokenizer,
) -> None:
    engine = start_engine(max_num_seqs=1, max_queue=2)
    service = make_service(engine.client, tokenizer)
    service.check_room(3)
    with pytest.raises(ApiError) as caught:
        service.check_room(4)
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert (
        caught.value.message == "n is 4; this server has room for 3 answers to one client at most."
    )
    with pytest.raises(ApiError) as caught:
        service.check_room(1, prompts=4)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    service.check_room(1, prompts=3)
    engine.client.submit((1, 2), SamplingParams(max_tokens=9))
    service.check_room(2)
    service.check_room(1, prompts=2)
    for choices, prompts in ((3, 1), (1, 3)):
        with pytest.raises(ApiError) as caught:
            service.check_room(choices, prompts)
        assert caught.value.status == 429
    engine.stop()


def test_seeds_differ_and_can_be_asked_for() -> None:
    seeds = {new_seed() for _ in range(100)}
    assert len(seeds) == 100
    for seed in seeds:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}], "seed": seed})


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
    wire = await parse(service, Request(scope, receive), ChatRequest)
    assert wire.messages[0].content == "é"


# --- the canary ------------------------------------------------------------------------------


async def test_a_token_within_the_time_is_a_sign_of_life(service: Service) -> None:
    client = PreparedClient([*SILENCE, [token(5)]])
    assert await around(service, client).canary()
    assert client.streams[0].closed
    assert client.streams[0].request.params.max_tokens == 1


async def test_a_fault_is_no_sign_of_life(service: Service) -> None:
    client = PreparedClient([[fault()]])
    assert not await around(service, client).canary()


async def test_tokens_of_others_are_a_sign_of_life_while_it_waits(service: Service) -> None:
    class Busy(PreparedClient):
        def submit(self, *arguments: Any, **options: Any) -> TokenStream:
            self.stats = EngineStats(generated_tokens=1)
            return super().submit(*arguments, **options)

    client = Busy([*SILENCE])
    assert await around(service, client).canary()
    assert client.streams[0].closed


async def test_a_vector_is_one_where_there_are_no_tokens(service: Service) -> None:
    event = TokenEvent(1, None, FinishReason.STOP, embedding=np.ones(3, np.float32))
    client = PreparedClient([*SILENCE, [event]])
    client.limits = replace(client.limits, embedding_size=3)
    assert await around(service, client).canary()
    assert client.streams[0].request.pooling
    assert client.streams[0].request.params.max_tokens == 0


async def test_silence_until_the_time_is_over_is_none(service: Service) -> None:
    client = PreparedClient([])
    assert not await around(service, client, IMPATIENT).canary()
    assert client.streams[0].closed


async def test_an_engine_that_has_ended_gives_none(service: Service) -> None:
    class Dead(PreparedClient):
        def submit(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise EngineDeadError

    assert not await around(service, Dead([])).canary()
