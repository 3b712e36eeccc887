"""The requests of Ollama's API: their fields, and their conversion to other APIs' types."""

import math
import re
from typing import ClassVar, Literal

from pydantic import Field

from server.config import LimitsSection
from server.protocol.answers import Json
from server.protocol.chat.request import CalledFunction, thinking
from server.protocol.chat.tools import WireTool, read_tools
from server.protocol.common import (
    MANY_STOPS,
    CachedFields,
    ListOf,
    LogprobFields,
    OpenAISamplingFields,
    RequestFields,
    SharedSampling,
    Whole,
    WireModel,
)
from server.protocol.embeddings import MAX_DIMENSIONS, EmbeddingRequest
from server.protocol.fields import refused
from server.protocol.unsupported import Unsupported
from server.protocol.wire_errors import check_count, invalid
from server.text.conversation import Conversation, OutputFormat, Thinking, ToolChoice, Turn

# Go's durations: https://pkg.go.dev/time#ParseDuration.
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
NUMBER = r"(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
PART = re.compile(f"({NUMBER})(ns|us|µs|μs|ms|s|m|h)")
DURATION = re.compile(f"([+-]?)((?:{PART.pattern})+|{NUMBER})", re.ASCII)


def keep_alive_s(value: float | str | None) -> float | None:
    """Return the seconds that an idle model stays loaded. ``value`` is a number of seconds, or a
    text such as "10m" or "1h30m". A negative value means infinity. Raises ApiError (400)."""
    if value is None:
        return None
    seconds = _seconds(value) if isinstance(value, str) else value
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float:
    duration = DURATION.fullmatch(text.strip())
    if duration is None:
        raise invalid(
            'keep_alive is no duration: write seconds, or a text such as "10m"; -1 is for ever, 0 '
            "is not at all.",
            "keep_alive",
        )
    sign, whole = duration[1], duration[2]
    parts = PART.findall(whole)
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    return (seconds if parts else float(whole)) * (-1 if sign == "-" else 1)


class OllamaSampling(LogprobFields, OpenAISamplingFields):
    """Ollama's options for sampling, under OpenAI's names."""

    stop_param: ClassVar[str] = "options.stop"
    stops_factor: ClassVar[int] = MANY_STOPS


class Options(SharedSampling):
    """Ollama's options for sampling."""

    refused_fields = refused("sampling", "options")

    repeat_penalty: float | None = Field(default=None, ge=0.01, le=10)
    repeat_last_n: Whole | None = None
    stop: str | ListOf[str] | None = None
    num_predict: Whole | None = Field(default=None, ge=-2, le=2**31 - 1)

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        self.sampling.check(limits)

    @property
    def sampling(self) -> OllamaSampling:
        given = self.model_dump(include={*SharedSampling.model_fields, "stop"})
        given["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n == 0:
            given |= {"presence_penalty": None, "frequency_penalty": None}
            given["repetition_penalty"] = 1.0
        # Numbers below 1 mean all tokens that fit.
        max_tokens = self.num_predict if (self.num_predict or 0) > 0 else None
        return OllamaSampling(**given, max_tokens=max_tokens)


class ChatCall(WireModel):
    """A tool call in an earlier answer."""

    id: str | None = None
    function: CalledFunction


class ChatMessage(WireModel):
    """One message of a conversation. ``tool_name`` and unknown fields are ignored."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: ListOf[str] | None = None
    tool_calls: ListOf[ChatCall] | None = None
    tool_call_id: str | None = None

    def turn(self, place: str, unsupported: Unsupported) -> Turn:
        return Turn(
            self.role,
            with_images(self.content or "", self.images, place, unsupported),
            self.thinking or "",
            tuple(call.function.to_call(call.id or "") for call in self.tool_calls or ()),
            self.tool_call_id,
        )


def with_images(text: str, images: list[str] | None, place: str, unsupported: Unsupported) -> str:
    """Put a note per image before a text. ``place`` is the prefix of field names in errors."""
    notes = [unsupported.note("image", f"{place}images[{n}]") for n in range(len(images or ()))]
    return "\n".join([*notes, text])


Effort = Literal["low", "medium", "high", "max"]
NEEDS_TEMPLATE = "a raw prompt is not put into the model's template, which that is for"


class KeptFields(CachedFields):
    """Fields of all requests that use a model."""

    keep_alive: float | str | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        keep_alive_s(self.keep_alive)

    @property
    def cached_fields(self) -> Json:
        return self.model_dump(include={*CachedFields.model_fields})


class AnswerFields(LogprobFields, KeptFields):
    """Fields of requests for an answer."""

    stream: bool | None = None
    format: dict[str, object] | str | None = None
    think: bool | Effort | None = None
    options: Options | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        (self.options or Options()).check(limits)
        self.check_logprobs()

    @property
    def sampling(self) -> OllamaSampling:
        sampling = (self.options or Options()).sampling
        return sampling.model_copy(update=self.model_dump(include={*LogprobFields.model_fields}))

    def output(self) -> OutputFormat | None:
        """Return the format that the answer must have, or None for any text. Raises ApiError."""
        if not self.format and self.format != {}:
            return None
        if isinstance(self.format, dict):
            return OutputFormat("json_schema", self.format, "format", strict=False)
        if self.format != "json":
            raise invalid('format must be "json", or a JSON schema.', "format")
        return OutputFormat("json_object", None, "format")

    def thinking(self) -> Thinking:
        if self.think is None or isinstance(self.think, bool):
            return Thinking(self.think)
        return thinking(self.think)


class OllamaChatRequest(AnswerFields):
    """The body of /api/chat."""

    refused_fields = refused("api/chat")

    messages: ListOf[ChatMessage] | None = None
    tools: ListOf[WireTool] | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        check_count(len(self.messages or ()), limits.max_messages, "messages")

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        tools, messages = read_tools(self.tools or []), self.messages or []
        return Conversation(
            turns=tuple(one.turn(f"messages[{n}].", unsupported) for n, one in enumerate(messages)),
            tools=tools,
            tool_choice=ToolChoice("auto" if tools else "none"),
            output=self.output(),
            thinking=self.thinking(),
            continues=messages[-1].role == "assistant",
        )


class OllamaGenerateRequest(AnswerFields):
    """The body of /api/generate."""

    refused_fields = refused("api/generate")

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: ListOf[str] | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        if not self.raw:
            return
        for name in ("system", "format", "think", "images"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported with raw: {NEEDS_TEMPLATE}.", name)

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def conversation(self, limits: LimitsSection, unsupported: Unsupported) -> Conversation:
        del limits
        system = [Turn("system", self.system)] if self.system else []
        question = Turn("user", with_images(self.prompt or "", self.images, "", unsupported))
        return Conversation(
            turns=(*system, question),
            tool_choice=ToolChoice("none"),
            output=self.output(),
            thinking=self.thinking(),
        )


class ShowRequest(RequestFields):
    """The body of /api/show."""

    refused_fields = refused("api/show")

    name: str | None = None


class OllamaEmbedRequest(KeptFields):
    """The body of /api/embed."""

    input: str | ListOf[str] | None = None
    dimensions: Whole | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)

    @property
    def neutral(self) -> EmbeddingRequest | None:
        """The request in the form of /v1/embeddings, or None if the request has no input."""
        if not self.input:
            return None
        return EmbeddingRequest(input=self.input, dimensions=self.dimensions, **self.cached_fields)


class OllamaEmbeddingsRequest(KeptFields):
    """The body of /api/embeddings, for older clients."""

    prompt: str | None = None

    @property
    def neutral(self) -> EmbeddingRequest | None:
        if not self.prompt:
            return None
        return EmbeddingRequest(input=self.prompt, **self.cached_fields)
