"""Convert deltas, the generated parts of an answer, to objects of /api/chat and /api/generate."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal

from server.protocol.answers import LINES, GatheredCall, Json, StreamForm, TokenText, token_objects
from server.protocol.wire_errors import ApiError, UnknownModelError
from server.text.conversation import Channel
from server.text.pieces import AnswerPiece, Delta, ToolCallArguments, ToolCallStart, Usage


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return ``{"error": message}`` with the name of the parameter in the message."""
    message = error.message
    if isinstance(error, UnknownModelError):
        message = error.ollama_message
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"error": message}


# The first version of Ollama with OpenAI's and Anthropic's APIs. Clients refuse older servers.
API_VERSION = "0.14.0"
UNKNOWN = "unknown"
FORMAT = "safetensors"
# An expiry that clients show as "forever", and that every calendar can express.
NEVER = datetime(2300, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's files."""

    family: str = UNKNOWN
    """``model_type`` in config.json."""
    parameters: int = 0
    """The number of weights, which is the same before and after quantization."""
    quantization: str = UNKNOWN
    """The format of the weights, such as ``BF16`` or ``4bit``."""
    size_bytes: int = 0
    """Size of the stored weights."""
    digest: str = "0" * 64
    """64 hexadecimal digits that change when the model's files change."""
    modified_at: datetime = EPOCH
    weights_bytes: int = 0
    """Size of the weights in memory."""
    fixed_bytes: int = 0
    """The planned memory of everything but K and V: weights, activations, states, caches."""
    on_gpu: bool = False


NO_FACTS = ModelFacts()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state of a model in memory."""

    size_bytes: int
    """The memory of the weights and of the current KV cache."""
    max_bytes: int
    """The model's part of the memory budget: all that the model may take."""
    on_gpu: bool = False
    expires_at: datetime | None = None
    """The time at which the model will be unloaded if no request comes, or None for never."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A description of a model, for people and programs that choose a model."""

    name: str
    facts: ModelFacts
    context_length: int
    """Maximum sequence length in tokens on this server, even if the model is not loaded."""
    capabilities: tuple[str, ...] = ()
    """Ollama's words for the model's abilities, from the function ``capabilities``."""
    loaded: Loaded | None = None
    template: str = ""
    """The unrendered chat template."""
    state: Json = field(default_factory=dict)
    """Fields of /v1/models that say since when a model is loaded, if models come and go."""

    @property
    def created(self) -> int:
        """The modification time of the model's files, in Unix seconds."""
        return int(self.facts.modified_at.timestamp())


def capabilities(*, embeds: bool, calls: bool, thinks: bool) -> tuple[str, ...]:
    """Return a model's capabilities in Ollama's words. ``embeds``: the model makes embeddings only.
    ``calls``: the chat template supports tools. ``thinks``: the template supports reasoning."""
    if embeds:
        return ("embedding",)
    return ("completion", *(["tools"] if calls else []), *(["thinking"] if thinks else []))


def tags_answer(models: Sequence[ModelInfo]) -> Json:
    return {
        "models": [
            _named(model) | {"modified_at": _time(model.facts.modified_at)} for model in models
        ]
    }


def ps_answer(models: Sequence[ModelInfo]) -> Json:
    return {
        "models": [
            _named(model)
            | {
                "size": loaded.size_bytes,
                "size_vram": loaded.size_bytes if loaded.on_gpu else 0,
                "size_max": loaded.max_bytes,
                "expires_at": _time(loaded.expires_at or NEVER),
                "context_length": model.context_length,
            }
            for model in models
            if (loaded := model.loaded) is not None
        ]
    }


def show_answer(model: ModelInfo) -> Json:
    info: Json = {
        "general.architecture": model.facts.family,
        "general.basename": model.name,
        "general.parameter_count": model.facts.parameters,
        f"{model.facts.family}.context_length": model.context_length,
    }
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "license": "",
        "template": model.template,
        "details": _details(model),
        "model_info": info,
        "capabilities": list(model.capabilities),
        "modified_at": _time(model.facts.modified_at),
    }


def version_answer() -> Json:
    return {"version": API_VERSION}


def _named(model: ModelInfo) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "size": model.facts.size_bytes,
        "digest": model.facts.digest,
        "details": _details(model),
    }


def _details(model: ModelInfo) -> Json:
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": model.facts.family,
        "families": [model.facts.family],
        "parameter_size": _short(model.facts.parameters),
        "quantization_level": model.facts.quantization,
    }


def _short(parameters: int) -> str:
    """Shorten a number, for example to "4.0B"."""
    for size, unit in UNITS:
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _time(moment: datetime) -> str:
    """Format a time as in RFC 3339, with microseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time_from_ns(nanoseconds: int) -> str:
    """Format a time since 1970 as in RFC 3339, with nanoseconds."""
    seconds, rest = divmod(nanoseconds, 10**9)
    whole = EPOCH + timedelta(seconds=seconds)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{rest:09}Z"


Kind = Literal["chat", "generate"]
TEXT = {"chat": "content", "generate": "response"}


@dataclass(slots=True)
class OllamaAnswer:
    """One answer, streamed or whole."""

    stream_form: ClassVar[StreamForm] = LINES

    kind: Kind
    model: str
    token_bytes: TokenText
    now_ns: Callable[[], int] = time.time_ns
    _call: GatheredCall | None = None
    _has_text: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: list[Json] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)
    _finish: str = "stop"

    def first_chunks(self) -> list[Json]:
        return [self._object({})]

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the objects to stream for a delta. A complete tool call is sent in one object."""
        parts = self._parts(delta)
        logprobs = token_objects(delta.tokens, self.token_bytes)
        if logprobs and not parts:
            parts = [{}]
        chunks = [self._object(part) for part in parts]
        if logprobs:
            chunks[0]["logprobs"] = logprobs
        return chunks

    def last_chunks(self, usage: Usage) -> list[Json]:
        return [self._object({}) | self._end(usage)]

    @staticmethod
    def failure(error: ApiError) -> Json:
        return ollama_error(error) | error.late_fields

    def add(self, delta: Delta) -> None:
        for part in self._parts(delta):
            self._calls += part.pop("tool_calls", [])
            for name, text in part.items():
                self._texts.setdefault(name, []).append(text)
        self._logprobs += token_objects(delta.tokens, self.token_bytes)

    def whole(self, usage: Usage) -> Json:
        message: Json = {name: "".join(texts) for name, texts in self._texts.items()}
        calls: Json = {"tool_calls": self._calls} if self._calls else {}
        logprobs: Json = {"logprobs": self._logprobs} if self._logprobs else {}
        return self._object(message | calls) | logprobs | self._end(usage)

    def nothing(self, *, unloads: bool) -> Json:
        """Return the answer to a request that only loads or unloads the model."""
        return self._object({}) | {"done": True, "done_reason": "unload" if unloads else "load"}

    def _object(self, part: Json) -> Json:
        head = {"model": self.model, "created_at": time_from_ns(self.now_ns())}
        text = {TEXT[self.kind]: ""}
        if self.kind == "generate":
            return head | text | part | {"done": False}
        return head | {"message": {"role": "assistant"} | text | part, "done": False}

    def _end(self, usage: Usage) -> Json:
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": nanoseconds(usage.elapsed_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(usage.first_token_s or 0.0),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(usage.generating_s),
        }

    def _parts(self, delta: Delta) -> list[Json]:
        parts = [part for piece in delta.pieces for part in self._feed(piece)]
        if delta.finish is not None:
            self._finish = delta.finish
            parts += self._end_call()
        return parts

    def _feed(self, piece: AnswerPiece) -> list[Json]:
        if isinstance(piece, ToolCallArguments):
            assert self._call is not None, "arguments follow the start of their call"
            self._call.arguments += piece.text
            return []
        before = self._end_call()
        if isinstance(piece, ToolCallStart):
            self._call = GatheredCall(piece)
            return before
        if piece.channel is Channel.REASONING:
            return [*before, {"thinking": piece.text}]
        return [*before, self._text(piece.text)]

    def _end_call(self) -> list[Json]:
        """End the call in progress. A call whose arguments are no JSON object becomes text."""
        call, self._call = self._call, None
        if call is None:
            return []
        if call.input is None:
            return [self._text(("\n" if self._has_text else "") + call.text)]
        function = {"index": call.start.index, "name": call.start.name, "arguments": call.input}
        return [{"tool_calls": [{"id": call.start.id, "function": function}]}]

    def _text(self, text: str) -> Json:
        self._has_text = True
        return {TEXT[self.kind]: text}


def nanoseconds(seconds: float) -> int:
    return round(seconds * 10**9)
