"""POST /api/chat and /api/generate: the requests as they come in."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field
from pydantic_core import to_json

from server.config import LimitsSection
from server.protocol.chat.request import CalledFunction, thinking
from server.protocol.chat.tools import WireTool, read_tools
from server.protocol.common import MAX_TOP_LOGPROBS, CacheSalt, ListOf, Whole, WireModel
from server.protocol.embeddings import MAX_DIMENSIONS, EmbeddingRequest
from server.protocol.fields import FieldRule, refuse_unsupported
from server.protocol.ollama.options import (
    OLLAMA_CHAT_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDINGS_FIELDS,
    OLLAMA_GENERATE_FIELDS,
    SHOW_FIELDS,
    Options,
    keep_alive_s,
)
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import invalid
from server.text.conversation import (
    Conversation,
    OutputFormat,
    Thinking,
    ToolCall,
    ToolChoice,
    Turn,
)


class ChatCall(WireModel):
    """A call that an earlier answer made."""

    id: str | None = None
    function: CalledFunction


class ChatMessage(WireModel):
    """One message of a conversation. ``tool_name`` and whatever else it has is ignored."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: ListOf[str] | None = None
    tool_calls: ListOf[ChatCall] | None = None
    tool_call_id: str | None = None

    def turn(self, place: str, unseen: Unseen) -> Turn:
        """Return the message in the neutral form. place: how errors name the message. Raises
        ApiError."""
        return Turn(
            self.role,
            with_images(self.content or "", self.images, place, unseen),
            self.thinking or "",
            self._calls,
            self.tool_call_id,
        )

    @property
    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(call.function.made(call.id or "") for call in self.tool_calls or ())


def with_images(text: str, images: list[str] | None, place: str, unseen: Unseen) -> str:
    """Return what the model reads of a text and the images before it. place: how errors name what
    has both. Raises ApiError."""
    notes = [unseen.note("image", f"{place}images[{n}]") for n in range(len(images or ()))]
    return "\n".join([*notes, text])


Effort = Literal["low", "medium", "high", "max"]
NEEDS_TEMPLATE = "a raw prompt is not put into the model's template, which that is for"


class KeptFields(WireModel):
    """What all requests have that a model answers."""

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[tuple[FieldRule, ...]] = ()

    model: str | None = None
    keep_alive: float | str | None = None
    cache_salt: CacheSalt | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        del limits
        refuse_unsupported(self.rules, self.model_extra or {})
        keep_alive_s(self.keep_alive)

    @property
    def unloads(self) -> bool:
        """Whether the model is not to stay in memory."""
        return keep_alive_s(self.keep_alive) == 0


class AnswerFields(KeptFields):
    """What requests for an answer have."""

    stream: bool | None = None
    format: dict[str, object] | str | None = None
    think: bool | Effort | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0)

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        super().check(limits)
        self.chosen_options.check(limits)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
        if (self.top_logprobs or 0) > MAX_TOP_LOGPROBS:
            raise invalid(f"top_logprobs may be at most {MAX_TOP_LOGPROBS}.", "top_logprobs")

    @property
    def chosen_options(self) -> Options:
        """The options, which may be none."""
        return self.options or Options()

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed: it is, unless it is not wanted so."""
        return self.stream is not False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that are wanted with each token; None: not even its own probability."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def output(self) -> OutputFormat | None:
        """Return the form that the answer must have; None: any text. Raises ApiError."""
        if not self.format and self.format != {}:
            return None
        if isinstance(self.format, dict):
            return OutputFormat("json_schema", self.format, "format")
        if self.format != "json":
            raise invalid('format must be "json", or a JSON schema.', "format")
        return OutputFormat("json_object", None, "format")

    def thinking(self) -> Thinking:
        if self.think is None or isinstance(self.think, bool):
            return Thinking(self.think)
        return thinking(self.think)


class OllamaChatRequest(AnswerFields):
    """The body of /api/chat; server/protocol/ollama/fields.py says what becomes of each field."""

    rules = OLLAMA_CHAT_FIELDS

    messages: ListOf[ChatMessage] | None = None
    tools: ListOf[WireTool] | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        super().check(limits)
        if len(self.messages or ()) > limits.max_messages:
            raise invalid(
                f"There are {len(self.messages or ())} messages; at most {limits.max_messages} are "
                "read.",
                "messages",
            )

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.messages

    def conversation(self, limits: LimitsSection, unseen: Unseen) -> Conversation:
        """Return the request in the neutral form. Raises ApiError that names what cannot be part of
        it."""
        tools, messages = read_tools(self.tools or []), self.messages or []
        return Conversation(
            turns=tuple(one.turn(f"messages[{n}].", unseen) for n, one in enumerate(messages)),
            tools=tools,
            tool_choice=ToolChoice("auto" if tools else "none"),
            output=self.output(),
            thinking=self.thinking(),
            continues=messages[-1].role == "assistant",
        )


class OllamaGenerateRequest(AnswerFields):
    """The body of /api/generate."""

    rules = OLLAMA_GENERATE_FIELDS

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: ListOf[str] | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        super().check(limits)
        if not self.raw:
            return
        for name in ("system", "format", "think", "images"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported with raw: {NEEDS_TEMPLATE}.", name)

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.prompt

    def conversation(self, limits: LimitsSection, unseen: Unseen) -> Conversation:
        """Return the request in the neutral form. Raises ApiError that names what cannot be part of
        it."""
        del limits
        system = [Turn("system", self.system)] if self.system else []
        asked = Turn("user", with_images(self.prompt or "", self.images, "", unseen))
        return Conversation(
            turns=(*system, asked),
            tool_choice=ToolChoice("none"),
            output=self.output(),
            thinking=self.thinking(),
        )


class ShowRequest(WireModel):
    """The body of /api/show."""

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[tuple[FieldRule, ...]] = SHOW_FIELDS

    model: str | None = None
    name: str | None = None

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the parameter."""
        del limits
        refuse_unsupported(self.rules, self.model_extra or {})


class OllamaEmbedRequest(KeptFields):
    """The body of /api/embed."""

    rules = OLLAMA_EMBED_FIELDS

    input: str | ListOf[str] | None = None
    dimensions: Whole | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)

    @property
    def neutral(self) -> EmbeddingRequest | None:
        """The same as /v1/embeddings has it; None where there is nothing to embed."""
        if not self.input:
            return None
        return EmbeddingRequest(
            input=self.input, dimensions=self.dimensions, cache_salt=self.cache_salt
        )


class OllamaEmbeddingsRequest(KeptFields):
    """The body of /api/embeddings, which is for older clients."""

    rules = OLLAMA_EMBEDDINGS_FIELDS

    prompt: str | None = None

    @property
    def neutral(self) -> EmbeddingRequest | None:
        """The same as /v1/embeddings has it; None where there is nothing to embed."""
        if not self.prompt:
            return None
        return EmbeddingRequest(input=self.prompt, cache_salt=self.cache_salt)


def embed_pieces(vectors: np.ndarray, head: dict[str, Any]) -> Iterator[bytes]:
    """Yield the answer of /api/embed as JSON, in pieces of a vector each. vectors: ``[inputs,
    dimensions]``. head: all else that it has."""
    yield to_json(head)[:-1] + b',"embeddings":['
    for index, vector in enumerate(vectors):
        yield (b"," if index else b"") + to_json(vector.tolist())
    yield b"]}"
