"""The C library's memory: where it lies, and that what is free goes back to the system.

What was taken and given back, it keeps in pieces: after a crowd or a long prompt that may be
hundreds of MiB. It gives back whole pages only, so the pieces should lie together.
"""

import ctypes
import os

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


def release_free_memory() -> None:
    """Ask the C library to keep none; musl's keeps little by itself."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
    elif hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, ctypes.c_size_t(0))
