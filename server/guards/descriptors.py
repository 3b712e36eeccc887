"""File descriptors: every connection takes one."""

import resource
import sys
from contextlib import suppress

# Sockets of our own, the model's files, the log, and what libraries have open.
OTHER_DESCRIPTORS = 256


def connections_that_fit(wanted: int) -> int:
    """Raises this process's limit as far as that many connections need it, and as many again that
    are being told that there are too many. Returns how many fit, at least one."""
    allowed = raise_descriptor_limit(2 * wanted + OTHER_DESCRIPTORS)
    return max(1, min(wanted, (allowed - OTHER_DESCRIPTORS) // 2))


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
