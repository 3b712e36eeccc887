"""Memory of this process: what stays, and what is released to the system while the server is idle.

What requests took and gave back, the C library keeps in pieces (engine/machine.py).
"""

import asyncio
import gc
from collections.abc import Callable
from math import inf

from engine.machine import release_free_memory
from server.chat.drain import Drain

# Looked at so often; with somebody there it waits for the next time.
LOOK_S = 15.0


def keep_what_is_there() -> None:
    """Spare all that a server begins with: the collector stops everybody to look at it."""
    gc.collect()
    gc.freeze()


async def release_when_idle(drain: Drain, keep_s: float, forget: Callable[[], None]) -> None:
    """Give free memory back again and again while nobody is there, once somebody was.

    Some of it is free only later; what the engine's caches hold, it gives back itself. To look
    where nothing is free takes a tenth of a millisecond. keep_s: after so long ``forget`` is
    called, too.
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
