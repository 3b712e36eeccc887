"""POST /v1/embeddings."""

import asyncio

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import EngineDeadError, PrefixSalt, TokenEvent
from server.metrics.answer_times import RequestTimes
from server.protocol.embeddings import EmbeddingRequest, Vectors, embedding_pieces, shorten
from server.protocol.wire_errors import (
    ApiError,
    generation_failed,
    input_too_long,
    invalid,
    too_many_tokens,
)
from server.routes.answering import json_response, unless_left
from server.routes.openapi import takes
from server.routes.service import Service
from server.text.tokenizer import TextsTooLongError, TextTooLongError

# A request has at most WINDOW * max_num_seqs inputs in the engine at once: enough to keep the
# engine busy, and few enough to leave the queue to other requests.
WINDOW = 2
LATE = "The server did not get to it in the time that a request may take (limits.max_request_s)."
Inputs = list[tuple[int, ...]]


def add_routes(router: APIRouter, service: Service) -> None:
    reader = service.reader

    @router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        wire = await reader.read(request, EmbeddingRequest)
        vectors, tokens = await vectors_of(service, request, wire)
        return await json_response(
            embedding_pieces(vectors, wire.encoding_format, service.model.id, tokens)
        )


async def vectors_of(
    service: Service, request: Request, wire: EmbeddingRequest
) -> tuple[Vectors, int]:
    """Return vectors and the number of input tokens. Raises ApiError, ClientDisconnect."""
    salt = service.reader.salt(request, wire)
    service.admission.check_vectors(salt.tenant, wire.dimensions)
    inputs = await _inputs(service, wire)
    computing = _vectors(service, wire, inputs, salt, request.state.times)
    vectors = await unless_left(request, computing)
    return shorten(vectors, wire.dimensions), sum(len(ids) for ids in inputs)


async def _inputs(service: Service, wire: EmbeddingRequest) -> Inputs:
    """Encode every input. Raises ApiError for an input that is empty, too long or invalid."""
    rules = service.rules
    limit, total = rules.max_model_len, rules.max_total_tokens
    texts = [one for one in wire.inputs if isinstance(one, str)]
    ids = [tuple(one) for one in wire.inputs if not isinstance(one, str)]
    if texts:
        ends = wire.add_special_tokens is not False
        try:
            async with service.encoding:
                ids = await service.tokenizer.encode_texts(texts, limit, total, ends=ends)
        except TextTooLongError as error:
            name = wire.name_of(error.number)
            raise input_too_long(error.tokens, limit, name, estimated=True) from error
        except TextsTooLongError as error:
            raise too_many_tokens(total, "input") from error
    for number, tokens in enumerate(ids):
        name = wire.name_of(number)
        if not tokens:
            raise invalid(f"The {name} is empty.", name)
        if len(tokens) > limit:
            raise input_too_long(len(tokens), limit, name)
        rules.check_token_ids(tokens, name)
    return ids


async def _vectors(
    service: Service, wire: EmbeddingRequest, inputs: Inputs, salt: PrefixSalt, times: RequestTimes
) -> Vectors:
    """Return one vector per input. If an input fails or the caller cancels, abort all inputs.
    Raises ApiError (500 or 503), also if the request's time is over."""
    ends_at = service.clock() + service.config.limits.max_request_s
    window = asyncio.Semaphore(WINDOW * service.client.limits.max_num_seqs)

    async def vector(ids: tuple[int, ...]) -> np.ndarray:
        async with window:
            (stream,) = service.client.submit(wire.request(ids, salt))
            (answer,) = times.answers_to(len(ids), 1, salt.tenant)
            try:
                events: list[TokenEvent] = []
                while not events:
                    left_s = ends_at - service.clock()
                    if left_s <= 0:
                        raise ApiError(503, LATE, type="server_error", code="request_time_over")
                    ping_s = service.config.server.sse_ping_s
                    events = await stream.next_batch(min(ping_s, left_s))
                answer.end("error" if events[-1].embedding is None else "stop")
            finally:
                stream.close()
                answer.end("aborted")
        if events[-1].embedding is None:
            raise generation_failed(events[-1].message or "aborted", "The embedding")
        return events[-1].embedding

    tasks = [asyncio.ensure_future(vector(ids)) for ids in inputs]
    try:
        return np.stack(await asyncio.gather(*tasks))
    except EngineDeadError as error:
        raise service.admission.no_engine() from error
    finally:
        for task in tasks:
            task.cancel()
