"""Release free memory of this process to the system while the server is idle.

Allocations of past requests stay in the C library, in pieces (engine/machine.py).
"""

import asyncio
import gc
from collections.abc import Callable
from math import inf

from engine.machine import release_free_memory
from server.chat.drain import Drain

# Seconds between two looks; a busy server waits for the next one.
LOOK_S = 15.0


def keep_what_is_there() -> None:
    """Exempt the objects of the start from garbage collection, which stops all threads."""
    gc.collect()
    gc.freeze()


async def release_when_idle(drain: Drain, keep_s: float, forget: Callable[[], None]) -> None:
    """Release free memory again and again while the server is idle after its first request. keep_s:
    idle time after which ``forget`` is called, too.

    Some memory is free only later; the engine's caches release their own. A look that finds nothing
    takes a tenth of a millisecond.
    """
    loop = asyncio.get_running_loop()
    idle_since = inf
    while True:
        await asyncio.sleep(LOOK_S)
        if drain.answering or not drain.answered:
            idle_since = inf
            continue
        idle_since = min(idle_since, loop.time())
        if loop.time() - idle_since >= keep_s:
            forget()
        await asyncio.to_thread(release_free_memory)
