"""Reads a request's body, and the salt that separates tenants' prompts in the prefix cache."""

import re
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.types import PrefixSalt
from server.chat.admission import Admission
from server.chat.salts import Salts, request_key
from server.chat.served_model import ServedModel
from server.config import Config, LimitsSection
from server.protocol.common import CachedFields, RequestFields, SamplingFields, limits_by_path
from server.protocol.unsupported import Api, Unsupported
from server.protocol.wire_errors import ApiError, from_validation
from server.text.conversation import Conversation

# application/json, and types with the suffix +json: RFC 6839, section 3.1.
JSON_TYPE = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)

NO_JSON = "The body must be JSON, and say so: send the header `Content-Type: application/json`."


class ConversationBody(Protocol):
    """A JSON body with a conversation."""

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        """Return the conversation in the form that all APIs share. Raises ApiError."""


ModelT = TypeVar("ModelT", bound=BaseModel)
BodyT = TypeVar("BodyT", bound=RequestFields)
GeneratingT = TypeVar("GeneratingT", bound=SamplingFields)


async def read_json(request: Request, limits: LimitsSection) -> bytes:
    """Read a body within the route's limits. Raises ApiError. Content types other than JSON get
    415, because browsers let any web page send some of them without asking first (no preflight)."""
    if not JSON_TYPE.match(request.headers.get("content-type", "")):
        raise ApiError(415, NO_JSON, code="unsupported_media_type")
    body = await request.body()
    await limits_by_path(limits)[request.scope["route"].path].check(body)
    return body


def parse_body(body_type: type[ModelT], body: bytes) -> ModelT:
    """Parse a body. Raises ApiError that names an invalid parameter."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, body) from error


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests within the limits of the settings."""

    config: Config
    model: ServedModel
    salts: Salts
    admission: Admission

    async def admit(
        self, request: Request, body_type: type[GeneratingT]
    ) -> tuple[GeneratingT, PrefixSalt]:
        """Read a request for answers, and check that the server can accept the request. Return body
        and salt. Raises ApiError like ``read`` and ``Admission.check_answers``."""
        body = await self.read(request, body_type)
        salt = self.salt(request, body)
        choices = body.response_options.choices
        self.admission.check_answers(salt.tenant, choices, body.num_prompts)
        return body, salt

    async def read(self, request: Request, body_type: type[BodyT]) -> BodyT:
        body = parse_body(body_type, await read_json(request, self.config.limits))
        self.model.check(body.model)
        body.check(self.config.limits)
        return body

    def salt(self, request: Request, body: CachedFields) -> PrefixSalt:
        """Return the salt of the request's prompts."""
        key = request_key(request.headers)
        return self.salts.salt(key, body.cache_salt, stays_in_memory=body.stays_in_memory)

    def tenant(self, request: Request) -> bytes:
        return self.salts.salt(request_key(request.headers), None).tenant

    def conversation(self, request: Request, body: ConversationBody, api: Api) -> Conversation:
        config = self.config
        return body.conversation(config.limits, self.unsupported(request, api))

    def unsupported(self, request: Request, api: Api) -> Unsupported:
        """Return a new object that handles the request's images and files, and counts them."""
        unsupported = Unsupported(getattr(self.config.images, api), f"images.{api}", api)
        request.state.unsupported = unsupported
        return unsupported
