"""Fields, limits and ids that the requests of several endpoints share."""

import asyncio
import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars

from engine.types import EngineLimits, PrefixSalt, Request, SamplingParams
from server.config import LimitsSection
from server.protocol.fields import RefusedFields, check_refused, refused
from server.protocol.wire_errors import ApiError, body_too_large, invalid, quoted
from server.text.conversation import OutputFormat
from server.text.json_object import MAX_VALUES, has_many_values, outside_texts
from server.text.tokenizer import EncodedText

# The nesting limit of pydantic-core's JSON reader (jiter).
MAX_DEPTH = 200
MAX_BODY_VALUES = 32_768
# Routes that take token ids have this limit instead of MAX_BODY_VALUES.
MAX_BODY_TOKEN_IDS = 327_680
MAX_TOKENIZE_BYTES = 512 * 1024
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
# A body is scanned in pieces of this size, because the scan of a piece blocks other tasks.
PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of one route's body."""

    max_bytes: int
    max_values: int
    """Maximum number of values: numbers, texts, lists, objects, true, false and null."""
    max_containers: int
    """Maximum number of lists and objects, and also the maximum number of names in objects."""

    async def check(self, body: bytes) -> None:
        """Raise ApiError for a body above the limits. Let other tasks run between pieces."""
        if len(body) > self.max_bytes:
            raise body_too_large(self.max_bytes)
        # A short body cannot exceed the limits, because a value and a comma take two characters.
        if len(body) <= 2 * min(self.max_values, self.max_containers):
            return
        values, containers, names, in_text = 1, 0, 0, False
        for piece in _pieces(body):
            outside, in_text = outside_texts(piece, in_text)
            begun = outside.count(b"[") + outside.count(b"{")
            containers += begun
            names += outside.count(b":")
            values += begun + outside.count(b",")
            if values > self.max_values:
                raise _too_many(f"{self.max_values} values")
            if max(containers, names) > self.max_containers:
                raise _too_many(f"{self.max_containers} lists and objects, or names in them")
            await asyncio.sleep(0)


TEXT_PATHS = (
    *("/v1/chat/completions", "/chat/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses", "/v1/responses/input_tokens"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
)
IDS_PATHS = ("/v1/completions", "/completions", "/v1/embeddings", "/detokenize")


def limits_by_path(limits: LimitsSection) -> dict[str, BodyLimits]:
    max_bytes, max_values = limits.max_body_bytes, MAX_BODY_VALUES
    return {
        **dict.fromkeys(TEXT_PATHS, BodyLimits(max_bytes, max_values, max_values)),
        **dict.fromkeys(IDS_PATHS, BodyLimits(max_bytes, MAX_BODY_TOKEN_IDS, max_values)),
        "/tokenize": BodyLimits(MAX_TOKENIZE_BYTES, max_values, max_values),
    }


def _too_many(what: str) -> ApiError:
    return invalid(f"The body has more than {what}.", code="too_many_values")


def _pieces(body: bytes) -> Iterator[bytes]:
    """Yield a body in pieces of about PIECE_BYTES, none of which ends within an escape sequence."""
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        end += (end - start - len(body[start:end].rstrip(b"\\"))) % 2
        yield body[start:end]
        start = end


HEADER = "x-request-id"
REQUEST_ID_BYTES = 12
CLIENTS_IDS = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_request_id() -> str:
    return f"req_{secrets.token_hex(REQUEST_ID_BYTES)}"


def bind_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the request's id, which all log lines of the request will contain. The id is the
    header x-request-id if that header is valid, or else a new id."""
    given = [value.decode("latin-1") for name, value in headers if name.lower() == HEADER.encode()]
    taken = len(given) == 1 and CLIENTS_IDS.fullmatch(given[0])
    request_id = given[0] if taken else new_request_id()
    clear_contextvars()
    bind_contextvars(request_id=request_id)
    return request_id


def current_request_id() -> str:
    bound = get_contextvars().get("request_id")
    return bound if isinstance(bound, str) else new_request_id()


NUM_SEEDS = 2**64
MAX_SEED = 2**63 - 1
# A request with this seed gets a random seed, as in Ollama, llama.cpp and vLLM.
RANDOM_SEED = -1
MAX_TOP_K = 2**31 - 1

# float32 cannot compute with smaller values.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6
MIN_BIAS, MAX_BIAS = -100, 100
# Anthropic's and Ollama's APIs set no limit on stop strings. But stop strings take time at each
# token, so for these APIs the limit here is limits.max_stop_strings times this factor.
MANY_STOPS = 128
BIAS_SCHEMA: JsonDict = {"type": "number", "minimum": MIN_BIAS, "maximum": MAX_BIAS}
MAX_CACHE_SALT_CHARS = 1024
MAX_TEMPLATE_VALUE_CHARS = 256
MAX_TEMPLATE_NUMBER = 2**31 - 1
# The readiness probe has priority -2**31, which comes before all others. Clients cannot set it.
MAX_PRIORITY = 2**31 - 1


def _whole(value: Any) -> Any:
    """Convert a whole float to int, because some clients write 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_list(values: Any) -> Any:
    """Apply ``_whole`` to a list. Long lists rarely contain floats, so look at the types first."""
    is_mixed = isinstance(values, list) and float in set(map(type, values))
    return [_whole(value) for value in values] if is_mixed else values


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=-1, le=2**31 - 1)]
Seed = Annotated[Whole, Field(ge=-MAX_SEED - 1, le=MAX_SEED)]
TopK = Annotated[Whole, Field(ge=-1, le=MAX_TOP_K)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
ItemT = TypeVar("ItemT")
# Long lists report only their first error.
ListOf = Annotated[list[ItemT], Field(fail_fast=True)]
TokenIds = Annotated[ListOf[TokenId], BeforeValidator(_whole_list)]


def _kind_of_input(value: Any) -> str | None:
    """Return the tag that selects a type in TextsOrIds. Only the first element decides, because a
    trial of all types is slow. Tags begin with capitals, so that errors omit the tags."""
    if isinstance(value, str):
        return "Text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "Lists"
    return "Ids" if isinstance(first, int | float) else "Texts"


def _template_value(value: Any) -> Any:
    """Check that a template argument is small, and a string, number, boolean or null."""
    if isinstance(value, str) and len(value) <= MAX_TEMPLATE_VALUE_CHARS:
        return value
    # bool is a subclass of int.
    if value is None or (isinstance(value, int | float) and abs(value) <= MAX_TEMPLATE_NUMBER):
        return value
    raise PydanticCustomError(
        "template_value",
        f"It must be true, false, a number up to {MAX_TEMPLATE_NUMBER}, or a text of at most "
        f"{MAX_TEMPLATE_VALUE_CHARS} characters",
    )


TemplateValue = Annotated[
    Any,
    AfterValidator(_template_value),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]}),
]

TextsOrIds = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[ListOf[str], Tag("Texts")]
    | Annotated[TokenIds, Tag("Ids")]
    | Annotated[ListOf[TokenIds], Tag("Lists")],
    Discriminator(
        _kind_of_input,
        custom_error_type="texts_or_ids",
        custom_error_message="It must be a text, token ids, or a list of either",
    ),
]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The number of choices (answers) in a response, and the reports that ``usage`` contains."""

    choices: int = 1
    include_usage: bool = False
    cache_report: bool = False
    """True if ``usage`` reports why the prefix cache had only a part of the prompt."""


class WireModel(BaseModel):
    """Base of requests' models: types are strict, and errors never repeat inputs."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class StreamOptions(WireModel):
    """Options of a stream."""

    include_usage: bool | None = None


class FieldsChecked(WireModel):
    """Keeps unknown fields, and refuses requests that set one of ``refused_fields``."""

    model_config = ConfigDict(extra="allow")
    refused_fields: ClassVar[RefusedFields] = ()

    def check(self, limits: LimitsSection) -> None:  # noqa: ARG002
        """Raise ApiError, which names the parameter, for wrong values of the right types."""
        check_refused(self.refused_fields, self.model_extra or {})


class RequestFields(FieldsChecked):
    """Fields of all requests."""

    model: str | None = None


IN_MEMORY: Literal["in_memory"] = "in_memory"


class CachedFields(RequestFields):
    """Fields of requests with prompts."""

    cache_salt: CacheSalt | None = None
    """Requests share cached prompts only if their salts are equal."""
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None

    @property
    def stays_in_memory(self) -> bool:
        """True if neither the prompt nor the answer may be kept on disk."""
        return self.prompt_cache_retention in ("in-memory", IN_MEMORY)


class SharedSampling(FieldsChecked):
    """Sampling fields that have the same names in all APIs and in Ollama's ``options``."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: Seed | None = None


class SamplingFields(SharedSampling, CachedFields):
    """Sampling fields that all APIs share, and further fields of vLLM and similar servers.
    A field that is null counts as missing."""

    stop_param: ClassVar[str] = "stop"
    """The name of the field with the stop strings, for error messages."""
    turns_param: ClassVar[str] = "messages"
    """The name of the field with the conversation, for error messages."""
    stops_factor: ClassVar[int] = 1
    """The limit of stop strings is this factor times the setting ``max_stop_strings``."""

    stream: bool | None = None
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    logit_bias: dict[str, Any] | None = Field(
        default=None, json_schema_extra={"additionalProperties": BIAS_SCHEMA}
    )
    """``check`` validates the biases, because pydantic would collect all errors of a long list."""
    cache_report: bool | None = None
    """True if ``usage`` must report why the prefix cache had only a part of the prompt."""
    min_tokens: Whole | None = Field(default=None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    priority: Whole | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        for stop in self.stop_strings():
            if not 0 < len(stop) <= MAX_STOP_STRING_CHARS:
                raise invalid(
                    f"A stop string must have 1 to {MAX_STOP_STRING_CHARS} characters.",
                    self.stop_param,
                )
        most_stops = limits.max_stop_strings * self.stops_factor
        if len(self.stop_strings()) > most_stops:
            raise invalid(f"There may be at most {most_stops} stop strings.", self.stop_param)
        if len(self.logit_bias or {}) > MAX_LOGIT_BIASES:
            raise invalid(f"There may be at most {MAX_LOGIT_BIASES} biases.", "logit_bias")
        for key, amount in (self.logit_bias or {}).items():
            is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not is_number or not MIN_BIAS <= amount <= MAX_BIAS:
                raise invalid(
                    f"The bias of token {quoted(key)} is no number from {MIN_BIAS} to {MAX_BIAS}.",
                    "logit_bias",
                )
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
            raise invalid(f"There may be at most {MAX_STOP_TOKEN_IDS} of them.", "stop_token_ids")

    @property
    def response_options(self) -> ResponseOptions:
        return ResponseOptions(cache_report=bool(self.cache_report))

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    @abstractmethod
    def asked_length(self) -> tuple[int | None, str]:
        """The answer's maximum number of tokens, and the name of the field that sets it. None and
        -1 mean all tokens that fit."""

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report per token; None reports no log-probabilities."""
        return None

    @property
    def prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt. Unless it is None, the answer may be empty."""
        return None

    def stop_strings(self) -> tuple[str, ...]:
        return ()

    def request(
        self,
        prompt: EncodedText,
        salt: PrefixSalt,
        limits: EngineLimits,
        defaults: dict[str, Any],
        stop_token_ids: frozenset[int],
    ) -> Request:
        """Return the engine's request. ``defaults`` are from generation_config.json. The model's
        ``stop_token_ids`` are added, unless ``ignore_eos``. Raises ApiError for invalid values."""
        room = limits.max_model_len - len(prompt.ids)
        params = self._sampling_params(room, limits.vocab_size, defaults, stop_token_ids)
        seeds = range(params.seed, params.seed + self.response_options.choices)
        return Request(
            prompt.ids,
            tuple(replace(params, seed=seed % NUM_SEEDS) for seed in seeds),
            priority=self.priority or 0,
            salt=salt,
            boundaries=prompt.boundaries,
            name=current_request_id(),
        )

    def _answer_length(self, room: int) -> int:
        """Return the answer's maximum number of tokens, of which ``room`` fit into the context."""
        wanted, param = self.asked_length
        if wanted is None or wanted == -1:
            return room
        least = 1 if self.prompt_logprobs is None else 0
        if wanted < least:
            raise invalid(f"{param} is {wanted}; it must be at least {least}.", param)
        return min(wanted, room)

    def _sampling_params(
        self, room: int, vocab_size: int, defaults: dict[str, Any], stop_token_ids: frozenset[int]
    ) -> SamplingParams:
        def chosen(field: str, otherwise: float) -> float:
            value = getattr(self, field)
            return float(defaults.get(field, otherwise) if value is None else value)

        max_tokens = self._answer_length(room)
        if (self.min_tokens or 0) > max_tokens:
            raise invalid(
                f"min_tokens is {self.min_tokens}, but the answer can have {max_tokens} tokens at "
                "most.",
                "min_tokens",
            )
        if any(token >= vocab_size for token in self.stop_token_ids or ()):
            raise invalid(f"Token ids go up to {vocab_size - 1}.", "stop_token_ids")
        own_stops = frozenset() if self.ignore_eos else stop_token_ids
        temperature = chosen("temperature", 1.0)
        seed = secrets.randbits(63) if self.seed in (None, RANDOM_SEED) else self.seed
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_p=max(MIN_TOP_P, chosen("top_p", 1.0)),
            top_k=max(0, int(chosen("top_k", 0))),
            min_p=chosen("min_p", 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=self._biases(vocab_size),
            seed=seed % NUM_SEEDS,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stop_token_ids=own_stops | frozenset(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
        )

    def _biases(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        biases = []
        for key, amount in (self.logit_bias or {}).items():
            if not key.isdecimal() or not key.isascii() or len(key) > 10 or int(key) >= vocab_size:
                raise invalid(
                    f"logit_bias has the key {quoted(key)}, which is no token id from 0 to "
                    f"{vocab_size - 1}.",
                    "logit_bias",
                )
            biases.append((int(key), float(amount)))
        return tuple(biases)


class OpenAISamplingFields(SamplingFields):
    """Sampling parameters as OpenAI names them."""

    refused_fields: ClassVar[RefusedFields] = refused("sampling")

    length_param: ClassVar[str] = "max_tokens"
    """The API's own field for the answer's length, which takes precedence over ``max_tokens``."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: str | ListOf[str] | None = None
    n: Whole | None = None

    def check(self, limits: LimitsSection) -> None:
        if not 1 <= self.response_options.choices <= limits.max_choices:
            raise invalid(f"n is {self.n}; it must be from 1 to {limits.max_choices}.", "n")
        super().check(limits)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true.", "stream_options")

    @property
    def response_options(self) -> ResponseOptions:
        return ResponseOptions(
            choices=1 if self.n is None else self.n,
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            cache_report=bool(self.cache_report),
        )

    @property
    def asked_length(self) -> tuple[int | None, str]:
        own = getattr(self, self.length_param)
        return (self.max_tokens, "max_tokens") if own is None else (own, self.length_param)

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class LogprobFields(WireModel):
    """Fields that ask for log-probabilities of an answer's tokens."""

    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0)

    def check_logprobs(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
        if (self.top_logprobs or 0) > MAX_TOP_LOGPROBS:
            raise invalid(f"top_logprobs may be at most {MAX_TOP_LOGPROBS}.", "top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Schema = dict[str, Any] | bool
SchemaOrText = dict[str, Any] | bool | str
KINDS: tuple[Literal["regex", "choice", "grammar"], ...] = ("regex", "choice", "grammar")
Answers = Annotated[ListOf[str], Field(min_length=1)]


class NamedSchema(WireModel):
    """A JSON schema with a name. The model does not see the name."""

    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """If true, refuse a schema with a part that cannot be enforced. If false, ignore such parts."""


class ResponseFormat(WireModel):
    """OpenAI's field for the format of an answer."""

    type: str
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    """Some clients send the schema here instead of within ``json_schema``."""


class StructuredOutputs(WireModel):
    """The field of vLLM and similar servers for the format of an answer."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Answers | None = None
    grammar: str | None = None
    structural_tag: Any = None


class StructureFields(WireModel):
    """The fields that constrain the format of an answer's text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Answers | None = None
    guided_grammar: str | None = None

    def output_format(self, own: OutputFormat | None = None) -> OutputFormat | None:
        """Return the format that the answer must have, or None for any text. ``own`` is the format
        in the endpoint's own field. Raises ApiError if two fields set a format."""
        formats = [*([own] if own else []), *self._response_format(), *self._other_formats()]
        if len(formats) > 1:
            raise invalid(
                f"{formats[0].param} and {formats[1].param} both say what the answer must be.",
                formats[1].param,
            )
        return formats[0] if formats else None

    def _response_format(self) -> list[OutputFormat]:
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return []
        if response_format.type not in ("json_object", "json_schema"):
            raise invalid(
                f"response_format {quoted(response_format.type)} is not supported.",
                "response_format.type",
            )
        named = response_format.json_schema or NamedSchema()
        for schema, param in (
            (named.schema_, "response_format.json_schema.schema"),
            (response_format.schema_, "response_format.schema"),
        ):
            if schema is not None:
                return [OutputFormat("json_schema", schema, param, named.strict is True)]
        return [OutputFormat("json_object")]

    def _other_formats(self) -> Iterator[OutputFormat]:
        structured, place = self.structured_outputs or StructuredOutputs(), "structured_outputs"
        if structured.structural_tag:
            raise invalid("structural_tag is not supported.", f"{place}.structural_tag")
        for schema, param in (
            (structured.json_, f"{place}.json"),
            (self.guided_json, "guided_json"),
        ):
            if schema is not None:
                yield _json(schema, param)
        if structured.json_object:
            yield OutputFormat("json_object", None, f"{place}.json_object")
        for kind in KINDS:
            if (value := getattr(structured, kind)) is not None:
                yield OutputFormat(kind, value, f"{place}.{kind}")
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield OutputFormat(kind, value, f"guided_{kind}")


def _json(schema: SchemaOrText, param: str) -> OutputFormat:
    """Return the output format for a schema, which may be JSON text. Raises ApiError."""
    if isinstance(schema, str):
        if has_many_values(schema):
            raise invalid(f"The text has more than {MAX_VALUES} values.", param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid("The text is no JSON.", param) from error
        if not isinstance(schema, dict | bool):
            raise invalid("The text is no schema.", param)
    return OutputFormat("json_schema", schema, param)
