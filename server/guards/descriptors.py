"""File descriptors: every connection takes one."""

import resource
import sys
from contextlib import suppress

# Heaps, sockets of our own, the model's files, the log, and what libraries have open. Where there
# are few, it is half of them, but what a server has open that serves nobody.
OTHER_DESCRIPTORS = 256
FEWEST_OTHER_DESCRIPTORS = 32


def connections_that_fit(wanted: int) -> int:
    """Raises this process's limit as far as that many connections need it, and as many again that
    are being told that there are too many. Returns how many fit, at least one."""
    allowed = raise_descriptor_limit(2 * wanted + OTHER_DESCRIPTORS)
    others = min(OTHER_DESCRIPTORS, max(FEWEST_OTHER_DESCRIPTORS, allowed // 2))
    return max(1, min(wanted, (allowed - others) // 2))


def raise_descriptor_limit(needed: int) -> int:
    """Raises the limit as far as needed and as the system lets it. Returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _finite(soft) < needed:
        # Some systems have a limit below the one that they tell.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, _finite(hard)), hard))
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
