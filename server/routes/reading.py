"""Reads a request: its body, and the salt that keeps its prefixes apart from other tenants'."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from engine.types import PrefixSalt
from server.chat.admission import Admission
from server.chat.salts import Salts, request_key
from server.chat.served_model import ServedModel
from server.config import Config, LimitsSection
from server.protocol.common import SamplingFields, limits_by_path
from server.protocol.unsupported import Api, Unsupported
from server.protocol.wire_errors import from_validation, not_json
from server.text.conversation import Conversation

# application/json, and types with the suffix +json: RFC 6839, section 3.1.
JSON_TYPE = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


class Body(Protocol):
    """The wire model of a body. model: None means the served model."""

    @property
    def model(self) -> str | None: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self:
        """Raises pydantic.ValidationError."""

    def check(self, limits: LimitsSection) -> None:
        """Raises ApiError that names the parameter."""


class ConversationBody(Protocol):
    """The wire model of a body with a conversation."""

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        """Translate the body into the neutral form. Raises ApiError."""


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)
GeneratingT = TypeVar("GeneratingT", bound=SamplingFields)


async def read_json(request: Request, limits: LimitsSection) -> bytes:
    """Read a body within the limits of its route. Raises ApiError, such as 415 for a body without a
    JSON type: web pages may send other types to any server without a preflight."""
    if not JSON_TYPE.match(request.headers.get("content-type", "")):
        raise not_json()
    body = await request.body()
    await limits_by_path(limits)[request.scope["route"].path].check(body)
    return body


def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Parse a body with a wire model. Raises ApiError that names the parameter."""
    try:
        return parse(body)
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
        """Read a request for answers and check that the server can take it. Return the body and the
        salt of its prompts. Raises ApiError like ``read`` and ``Admission.check_answers``."""
        body = await self.read(request, body_type)
        salt = self.salt(request, body.cache_salt)
        choices = body.response_options.choices
        self.admission.check_answers(salt.tenant, choices, body.num_prompts)
        return body, salt

    async def read(self, request: Request, body_type: type[BodyT]) -> BodyT:
        """Read, parse and check a body. Raises ApiError."""
        raw = await read_json(request, self.config.limits)
        body = parse_body(body_type.model_validate_json, raw)
        self.model.check(body.model)
        body.check(self.config.limits)
        return body

    def salt(self, request: Request, cache_salt: str | None = None) -> PrefixSalt:
        """Return the salt of a request's prefixes. cache_salt: from the body."""
        return self.salts.salt(request_key(request.headers), cache_salt)

    def conversation(self, request: Request, body: ConversationBody, api: Api) -> Conversation:
        config = self.config
        return body.conversation(config.limits, self.unsupported(request, api))

    def unsupported(self, request: Request, api: Api) -> Unsupported:
        """Return an API's treatment of images and files; headers and log report the counts."""
        unsupported = Unsupported(getattr(self.config.images, api), f"images.{api}", api)
        request.state.unsupported = unsupported
        return unsupported
