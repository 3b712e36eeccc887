"""What the routes share: the served model, its engine and tokenizer, and the rules for requests."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from engine.client import EngineClient
from engine.errors import EngineDeadError, QueueFullError, ShareFullError
from engine.types import PrefixSalt, SamplingParams, TokenEvent
from server.chat.choices import Choices
from server.chat.drain import Drain
from server.chat.generation import Prompt
from server.chat.salts import Salts, request_key
from server.config import Config
from server.metrics import Metrics
from server.metrics.answer_times import RequestTimes
from server.metrics.recent_requests import RecentRequests
from server.metrics.requests import Refusal
from server.protocol.answers import ResponseMetadata
from server.protocol.body_limits import limits_by_path
from server.protocol.common import WireModel
from server.protocol.unseen import Unseen
from server.protocol.wire_errors import (
    ApiError,
    ContextOverflowError,
    from_validation,
    invalid,
    key_share_full,
    model_not_found,
    not_json,
    overloaded,
    shutting_down,
    unavailable,
)
from server.text.calls.written import WrittenCalls
from server.text.grammar.compiler import GrammarCompiler
from server.text.reasoning_cache import ReasoningCache
from server.text.tokenizer import Tokenizer

WireModelT = TypeVar("WireModelT", bound=WireModel)
# RFC 6839, section 3.1: application/json, and types that are written in it.
JSON_TYPE = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
CANARY_PRIORITY = -(2**31)
ENCODED_AT_ONCE = 8
CANARY_POLL_S = 0.1
ENGINE_ENDED = "The engine has ended; the server must be restarted."


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The names of the model, and the parameters that its makers recommend."""

    names: tuple[str, ...]
    """Names that match; the first one is the id."""
    defaults: dict[str, Any]
    """Sampling parameters of generation_config.json, for what a request leaves out."""
    stop_token_ids: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """What the model is called in answers."""
        return self.names[0]

    def is_called(self, name: str) -> bool:
        """Return whether a client's name means this model. Slashes at the end do not count. An
        organisation before the name counts only if both names have one: ``name`` is ``org/name``
        and ``org/alias`` is ``alias``, but ``mine/name`` is not ``yours/name``."""
        requested = name.rstrip("/")
        base = requested.rpartition("/")[2]
        names = [name.rstrip("/") for name in self.names]
        bases = [name.rpartition("/")[2] for name in names]
        return bool(requested) and (requested in names or base in names or requested in bases)


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that a route needs."""

    config: Config
    model: ServedModel
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics
    grammars: GrammarCompiler
    written_calls: WrittenCalls
    reasoning_cache: ReasoningCache
    salts: Salts = field(default_factory=Salts)
    drain: Drain = field(default_factory=Drain)
    recent: RecentRequests = field(default_factory=RecentRequests)
    encoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ENCODED_AT_ONCE))
    """Held while a prompt is made. A request that has waited for it checks again for room: of a
    crowd only those are encoded that find a place."""
    tokenizing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while /tokenize encodes, which may be many ids."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; measures the time of a request."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.client.limits.max_model_len

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that all texts of one body may have together, as its token ids may."""
        return max(self.config.limits.max_body_token_ids, self.max_model_len)

    def check_model(self, name: str | None) -> None:
        """Check the name of a model; none means ours. Raises ApiError (404) for a model that is not
        served."""
        if name is not None and not self.model.is_called(name):
            raise model_not_found(name)

    def new_metadata(self, prefix: str, separator: str = "-") -> ResponseMetadata:
        """Make the id, time and model of a new response."""
        return ResponseMetadata(
            f"{prefix}{separator}{secrets.token_hex(12)}", int(time.time()), self.model.id
        )

    def salt(self, request: Request, cache_salt: str | None) -> PrefixSalt:
        """Return with whom a request shares what is kept. cache_salt: its own."""
        return self.salts.salt(request_key(request.headers), cache_salt)

    def unseen(self, request: Request, api: Literal["chat", "responses", "messages"]) -> Unseen:
        """Return what becomes of images in a request of that API. The response's header and the
        line in the log say how many there were."""
        found = Unseen(getattr(self.config.images, api), f"images.{api}")
        request.state.unseen = found
        return found

    def check_room(self, choices: int, prompts: int = 1, *, key: str = "") -> None:
        """Check that answers can be generated and have room. choices: answers to each prompt. key:
        the request's. Raises ApiError (400, 429 or 503) before work is spent on a request that
        would be refused; also where the model generates nothing."""
        if not self.client.alive:
            raise self.no_engine()
        if self.client.limits.embedding_size is not None:
            raise invalid(
                "This model makes embeddings and generates no text: use /v1/embeddings, or serve a "
                "model that generates.",
                "model",
            )
        most = self.client.max_share
        if choices * prompts > most:
            counts = f"n is {choices}" + (
                f" and there are {prompts} prompts" if prompts > 1 else ""
            )
            raise invalid(
                f"{counts}; this server has room for {most} answers to one client at most.",
                "prompt" if prompts > 1 else "n",
            )
        self._check_places(choices * prompts, key)

    def no_engine(self) -> ApiError:
        """Make the 503 for requests that the engine does not take any more."""
        if self.drain.draining:
            return shutting_down(self.config.limits.retry_after_s)
        return unavailable(ENGINE_ENDED)

    def check_embeds(self, dimensions: int | None, *, key: str = "") -> None:
        """Check that vectors can be made and have room. dimensions: of the vectors; None: as many
        as the model has. Raises ApiError as ``check_room`` does."""
        if not self.client.alive:
            raise self.no_engine()
        size = self.client.limits.embedding_size
        if size is None:
            raise invalid(
                "This model generates text and makes no embeddings: serve a model that is made for "
                "them, such as Qwen3-Embedding.",
                "model",
            )
        if dimensions is not None and dimensions > size:
            raise invalid(f"dimensions is {dimensions}; it must be from 1 to {size}.", "dimensions")
        self._check_places(1, key)

    def _check_places(self, places: int, key: str) -> None:
        try:
            self.client.check_room(places, self.salts.salt(key, None).tenant)
        except QueueFullError as error:
            raise self._full(error) from error

    def _full(self, error: QueueFullError) -> ApiError:
        """Count a refusal for lack of room, and make its error."""
        of_the_key = isinstance(error, ShareFullError)
        self.metrics.count_refusal(Refusal.KEY_SHARE if of_the_key else Refusal.QUEUE_FULL)
        retry_after_s = self.config.limits.retry_after_s
        return key_share_full(retry_after_s) if of_the_key else overloaded(retry_after_s)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Check token ids. Raises ApiError for ids that the model does not have."""
        most = self.client.limits.vocab_size - 1
        if max(ids, default=0) > most:
            raise invalid(f"The {param} has a token id above {most}.", param)

    def check_prompt(self, ids: tuple[int, ...], param: str) -> None:
        """Check a prompt. Raises ApiError for one that is empty or can never fit."""
        if not ids:
            raise invalid(f"The {param} has no tokens.", param)
        if len(ids) >= self.max_model_len:
            raise ContextOverflowError(len(ids), self.max_model_len, param)

    def start(self, *prompts: Prompt, times: RequestTimes | None = None) -> Choices:
        """Submit prompts that ``check_prompt`` has accepted to the engine. times: of their request.
        Raises ApiError: 429 or 503."""
        try:
            return Choices(
                self.client,
                self.tokenizer,
                *prompts,
                times=times,
                max_s=self.config.limits.max_request_s,
                clock=self.clock,
            )
        except QueueFullError as error:
            raise self._full(error) from error
        except EngineDeadError as error:
            raise self.no_engine() from error

    async def canary(self) -> bool:
        """Return whether the engine can generate one token now, ahead of all others; or make one
        vector."""
        pooling = self.client.limits.embedding_size is not None
        params = SamplingParams(max_tokens=0 if pooling else 1, temperature=0.0)
        computed = self._computed_tokens
        deadline = time.monotonic() + self.config.server.ready_timeout_s
        try:
            stream = self.client.submit(
                (0,), params, priority=CANARY_PRIORITY, pooling=pooling, beyond_queue=True
            )
        except EngineDeadError:
            return False
        try:
            while time.monotonic() < deadline:
                if events := await stream.next_batch(CANARY_POLL_S):
                    return any(map(_is_alive, events))
                # While every slot is taken the canary waits; the others' tokens prove the same.
                if self._computed_tokens > computed:
                    return True
            return False
        finally:
            stream.close()

    @property
    def _computed_tokens(self) -> int:
        """Tokens that the engine has generated or prefilled since it started."""
        stats = self.client.stats
        return stats.generated_tokens + stats.prompt_tokens


async def parse(service: Service, request: Request, model: type[WireModelT]) -> WireModelT:
    """Validate the request's body, within the limits of its route. Raises ApiError that names the
    parameter; 415 for a body that does not say that it is JSON, which pages may send to any server
    without asking."""
    if not JSON_TYPE.match(request.headers.get("content-type", "")):
        raise not_json()
    body = await request.body()
    await limits_by_path(service.config.limits)[request.scope["route"].path].check(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, body) from error


def new_seed() -> int:
    """Draw a seed for a request that names none."""
    return secrets.randbits(63)


def _is_alive(event: TokenEvent) -> bool:
    """Return whether the model has produced a token or a vector."""
    return event.token_id is not None or event.embedding is not None
