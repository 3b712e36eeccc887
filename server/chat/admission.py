"""Refuse requests that the engine has no room for, and test if the engine computes tokens."""

import time
from dataclasses import dataclass

from engine.serving import ServingEngine
from engine.types import EngineDeadError, QueueFullError, Request, SamplingParams, ShareFullError
from server.chat.drain import Drain
from server.metrics import Metrics
from server.metrics.requests import Refusal
from server.protocol.wire_errors import ApiError, come_back, invalid, shutting_down, unavailable

PROBE_PRIORITY = -(2**31)
PROBE_POLL_S = 0.1


async def generates(client: ServingEngine, timeout_s: float) -> bool:
    """Return True if the engine computes a token in time, for a request of highest priority."""
    pooling = client.limits.embedding_size is not None
    params = SamplingParams(max_tokens=0 if pooling else 1, temperature=0.0)
    probe = Request((0,), (params,), priority=PROBE_PRIORITY, pooling=pooling, beyond_queue=True)
    computed = _computed_tokens(client)
    deadline = time.monotonic() + timeout_s
    try:
        (stream,) = client.submit(probe)
    except EngineDeadError:
        return False
    try:
        while time.monotonic() < deadline:
            if events := await stream.next_batch(PROBE_POLL_S):
                return any(e.token_id is not None or e.embedding is not None for e in events)
            # If other requests take all slots, their tokens also prove that the engine works.
            if _computed_tokens(client) > computed:
                return True
        return False
    finally:
        stream.close()


def _computed_tokens(client: ServingEngine) -> int:
    stats = client.stats
    return stats.generated_tokens + stats.prompt_tokens


ENGINE_ENDED = "The engine has ended; the server must be restarted."


@dataclass(frozen=True, slots=True)
class Admission:
    """Refuses requests that the engine has no room for, before the server works on the requests."""

    client: ServingEngine
    metrics: Metrics
    drain: Drain

    def check_answers(self, tenant: bytes, choices: int = 1, prompts: int = 1) -> None:
        """Raise ApiError (400, 429 or 503) if the engine has no room for the request's answers."""
        if not self.client.alive:
            raise self.no_engine()
        if self.client.limits.embedding_size is not None:
            raise invalid(
                "This model makes embeddings and generates no text: use /v1/embeddings, or serve a "
                "model that generates.",
                "model",
            )
        max_share = self.client.slots.max_share
        if choices * prompts > max_share:
            several = f" and there are {prompts} prompts" if prompts > 1 else ""
            raise invalid(
                f"n is {choices}{several}; this server has room for {max_share} answers to one "
                "client at most.",
                "prompt" if several else "n",
            )
        self._check_places(tenant, choices * prompts)

    def check_vectors(self, tenant: bytes, dimensions: int | None) -> None:
        """Raise ApiError (400, 429 or 503) if the engine cannot compute embeddings of this size."""
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
        self._check_places(tenant, 1)

    def no_engine(self) -> ApiError:
        if self.drain.draining:
            return shutting_down()
        return unavailable(ENGINE_ENDED)

    def count_refusal(self, error: QueueFullError) -> ApiError:
        """Count a request that was refused for lack of room. Return the error for the client."""
        if isinstance(error, ShareFullError):
            self.metrics.count_refusal(Refusal.KEY_SHARE)
            message = "This API key has all the places that one key may have"
            return come_back(429, message, "key_share_full")
        self.metrics.count_refusal(Refusal.QUEUE_FULL)
        return come_back(429, "The queue is full", "queue_full")

    def _check_places(self, tenant: bytes, places: int) -> None:
        try:
            self.client.slots.check(places, tenant)
        except QueueFullError as error:
            raise self.count_refusal(error) from error
