"""File descriptors: every connection takes one, and every heap of a CPU's cache."""

import resource
import sys

# Heaps, sockets of our own, the model's files, the log, and what libraries have open. Where there
# are few, it is half of them, but what a server has open that serves nobody.
OTHER_DESCRIPTORS = 256
FEWEST_OTHER_DESCRIPTORS = 32


def connections_that_fit(wanted: int) -> int:
    """Raises this process's limit. Returns how many of so many connections fit, at least one, with
    as many again that are being told that there are too many."""
    allowed = raise_descriptor_limit()
    others = min(OTHER_DESCRIPTORS, max(FEWEST_OTHER_DESCRIPTORS, allowed // 2))
    return max(1, min(wanted, (allowed - others) // 2))


def raise_descriptor_limit() -> int:
    """Raises this process's limit as far as the system lets it, and never fails. Returns what it is
    now.

    The hard limit need not be to be had. A Mac's is infinite, and setrlimit(2) refuses infinity and
    all beyond kern.maxfilesperproc: then the most that is not refused is found by halves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed, refused = _finite(soft), _finite(hard) + 1
    asked = refused - 1
    while allowed < asked:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked, hard))
            allowed = asked
        except (ValueError, OSError):
            refused = asked
        asked = (allowed + refused) // 2
    return allowed


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
