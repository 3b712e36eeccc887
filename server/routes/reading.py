"""Read a request: its body, its model, its tenant."""

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

# RFC 6839, section 3.1: application/json, and types that are written in it.
JSON_TYPE = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


class Body(Protocol):
    """The wire model of a body. model: None means ours."""

    @property
    def model(self) -> str | None: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self:
        """Raises pydantic.ValidationError."""

    def check(self, limits: LimitsSection) -> None:
        """Raises ApiError that names the parameter."""


class ConversationBody(Protocol):
    """The wire model of a conversation."""

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        """Translate into the neutral form. Raises ApiError."""


T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)
GeneratingT = TypeVar("GeneratingT", bound=SamplingFields)


async def read_json(request: Request, limits: LimitsSection) -> bytes:
    """Read a body within the limits of its route. Raises ApiError: 415 for a body that does not say
    that it is JSON, which pages may send to any server without asking."""
    if not JSON_TYPE.match(request.headers.get("content-type", "")):
        raise not_json()
    body = await request.body()
    await limits_by_path(limits)[request.scope["route"].path].check(body)
    return body


def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Parse a body by a wire model. Raises ApiError that names the parameter."""
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
        """Read a body that asks for answers, and admit it. Return it, and the salt of its prompts.
        Raises ApiError as ``read`` and ``Admission.check_answers`` do."""
        body = await self.read(request, body_type)
        salt = self.salt(request, body.cache_salt)
        choices = body.response_options.choices
        self.admission.check_answers(salt.tenant, choices, body.num_prompts)
        return body, salt

    async def read(self, request: Request, body_type: type[BodyT]) -> BodyT:
        """Read and check the body as ``read_json`` and ``parse_body`` do."""
        raw = await read_json(request, self.config.limits)
        body = parse_body(body_type.model_validate_json, raw)
        self.model.check(body.model)
        body.check(self.config.limits)
        return body

    def salt(self, request: Request, cache_salt: str | None = None) -> PrefixSalt:
        """Return the salt of a request's prefixes. cache_salt: its own."""
        return self.salts.salt(request_key(request.headers), cache_salt)

    def conversation(self, request: Request, body: ConversationBody, api: Api) -> Conversation:
        """Return a body's conversation. Raises ApiError."""
        config = self.config
        return body.conversation(config.limits, self.unsupported(request, api))

    def unsupported(self, request: Request, api: Api) -> Unsupported:
        """Return the treatment of images and files in a request of that API. The response's headers
        and the log count them."""
        unsupported = Unsupported(getattr(self.config.images, api), f"images.{api}", api)
        request.state.unsupported = unsupported
        return unsupported
