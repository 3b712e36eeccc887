"""Memory of this process: what stays, and what is released to the system while the server is idle.

What requests took and gave back, the C library keeps in pieces: after a crowd that may be hundreds
of MiB. It gives back whole pages only, so the pieces should lie together.
"""

import asyncio
import ctypes
import gc
import os
from collections.abc import Callable
from math import inf

from server.chat.drain import Drain

# Looked at so often; with somebody there it waits for the next time.
LOOK_S = 15.0
# Of glibc's malloc.h; and the variable by which a user decides it.
M_ARENA_MAX, ARENA_MAX_VARIABLE = -8, "MALLOC_ARENA_MAX"


def use_one_arena() -> None:
    """Let all threads take memory from one place, unless the user has said otherwise.

    glibc gives each thread an arena of its own: what a crowd leaves, a little in every page, was
    three times as much. Few threads here allocate at the same time. To be called before they start.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and ARENA_MAX_VARIABLE not in os.environ:
        library.mallopt(M_ARENA_MAX, 1)


def keep_what_is_there() -> None:
    """Spare all that a server begins with: the collector stops everybody to look at it."""
    gc.collect()
    gc.freeze()


async def release_when_idle(drain: Drain, keep_s: float, forget: Callable[[], None]) -> None:
    """Give free memory back again and again while nobody is there, once somebody was.

    Some of it is free only later: the engine empties its caches after ``cache.idle_release_s``. To
    look where nothing is free takes a tenth of a millisecond. keep_s: after so long ``forget`` is
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


def release_free_memory() -> None:
    """Ask the C library to keep none; musl's keeps little by itself."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
