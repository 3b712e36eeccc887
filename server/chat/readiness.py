"""Readiness: whether the engine still generates."""

import time

from engine.errors import EngineDeadError
from engine.serving import ServingEngine
from engine.types import SamplingParams, TokenEvent

CANARY_PRIORITY = -(2**31)
CANARY_POLL_S = 0.1


async def generates(client: ServingEngine, timeout_s: float) -> bool:
    """Return whether the engine can generate one token now, ahead of all others; or make one
    vector."""
    pooling = client.limits.embedding_size is not None
    params = SamplingParams(max_tokens=0 if pooling else 1, temperature=0.0)
    computed = _computed_tokens(client)
    deadline = time.monotonic() + timeout_s
    try:
        stream = client.submit(
            (0,), params, priority=CANARY_PRIORITY, pooling=pooling, beyond_queue=True
        )
    except EngineDeadError:
        return False
    try:
        while time.monotonic() < deadline:
            if events := await stream.next_batch(CANARY_POLL_S):
                return any(map(_is_alive, events))
            # While every slot is taken the canary waits; the others' tokens prove the same.
            if _computed_tokens(client) > computed:
                return True
        return False
    finally:
        stream.close()


def _computed_tokens(client: ServingEngine) -> int:
    """Return how many tokens the engine has generated or prefilled since it started."""
    stats = client.stats
    return stats.generated_tokens + stats.prompt_tokens


def _is_alive(event: TokenEvent) -> bool:
    return event.token_id is not None or event.embedding is not None
