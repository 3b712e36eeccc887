"""The parts of a server of one model, and what its routes share with a server of several models."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.serving import ServingEngine
from server.chat.admission import Admission, generates
from server.chat.drain import Drain, Requests
from server.chat.prompting import ChatPrompts
from server.chat.salts import Salts
from server.chat.served_model import PromptRules, ServedModel
from server.config import Config
from server.metrics import HttpMetrics, Metrics
from server.metrics.answer_times import RecentRequests
from server.protocol.answers import Json
from server.protocol.ollama.answer import Loaded, ModelInfo, capabilities
from server.protocol.wire_errors import unavailable
from server.routes.answering import Answering
from server.routes.reading import RequestReader
from server.text.calls.written import WrittenCalls
from server.text.grammar.compiler import GrammarCompiler
from server.text.reasoning_cache import ReasoningCache
from server.text.tokenizer import Tokenizer

ENCODED_AT_ONCE = 8


class Served(Requests, Protocol):
    """A server's state and models, for the routes that every server has."""

    @property
    def config(self) -> Config: ...
    @property
    def drain(self) -> Drain: ...
    @property
    def metrics(self) -> HttpMetrics: ...
    @property
    def replicas(self) -> Callable[[], list[Json]] | None:
        """A function that returns a cluster's replicas, or None if this is no cluster."""

    async def check_ready(self) -> None:
        """Raise ApiError (503) if the server cannot answer requests for answers yet."""

    async def list_models(self) -> list[ModelInfo]:
        """Return the models that the server can serve."""

    async def list_loaded(self) -> list[ModelInfo]:
        """Return the models that are in memory."""

    async def find_model(self, name: str | None) -> ModelInfo:
        """Return the model that a request names. Raises ApiError (404)."""

    async def describe_model(self, name: str | None) -> ModelInfo:
        """Find a model, and read its capabilities and template. Raises ApiError (404 or 503)."""


@dataclass(slots=True)
class Service:
    """The parts of a server with one model. The properties make further parts from the fields."""

    config: Config
    model: ServedModel
    tokenizer: Tokenizer
    client: ServingEngine
    metrics: Metrics
    grammars: GrammarCompiler
    salts: Salts
    drain: Drain = field(default_factory=Drain)
    recent: RecentRequests = field(default_factory=RecentRequests)
    encoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ENCODED_AT_ONCE))
    clock: Callable[[], float] = time.monotonic
    replicas: Callable[[], list[Json]] | None = None
    written_calls: WrittenCalls = field(init=False)
    reasoning_cache: ReasoningCache = field(init=False)

    def __post_init__(self) -> None:
        self.written_calls = WrittenCalls(self.config.limits.max_written_call_bytes)
        self.reasoning_cache = ReasoningCache(self.config.limits.max_thought_bytes)

    @property
    def reader(self) -> RequestReader:
        return RequestReader(self.config, self.model, self.salts, self.admission)

    @property
    def admission(self) -> Admission:
        return Admission(self.client, self.metrics, self.drain)

    @property
    def rules(self) -> PromptRules:
        return PromptRules(self.model, self.client.limits)

    @property
    def prompts(self) -> ChatPrompts:
        return ChatPrompts(
            self.tokenizer,
            self.rules,
            self.admission,
            self.grammars,
            self.written_calls,
            self.reasoning_cache,
            self.encoding,
            self.config.limits,
        )

    @property
    def answering(self) -> Answering:
        return Answering(self.client, self.tokenizer, self.admission, self.config, self.clock)

    @property
    def alive(self) -> bool:
        return self.client.alive

    def end_all(self, message: str) -> None:
        self.client.end_all(message)

    async def check_ready(self) -> None:
        """Have a token generated: a server whose engine is stuck is not ready."""
        if not await generates(self.client, self.config.server.ready_timeout_s):
            raise unavailable("The engine did not generate a token in time.")

    async def list_models(self) -> list[ModelInfo]:
        return [await self.find_model(None)]

    list_loaded = list_models

    async def find_model(self, name: str | None) -> ModelInfo:
        self.model.check(name)
        template, kv, facts = self.tokenizer.template, self.client.stats.kv, self.model.facts
        return ModelInfo(
            self.model.id,
            facts,
            self.rules.max_model_len,
            capabilities(
                embeds=self.client.limits.embedding_size is not None,
                calls=template.tool_format is not None,
                thinks=template.knows_thoughts,
            ),
            loaded=Loaded(
                facts.weights_bytes + (0 if kv is None else kv.committed_bytes),
                facts.fixed_bytes + (0 if kv is None else kv.capacity_bytes),
                on_gpu=facts.on_gpu,
            ),
            template=template.text,
        )

    describe_model = find_model
