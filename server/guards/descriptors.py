"""File descriptors: every connection takes one, and every heap of a CPU's cache."""

from engine.machine import raise_descriptor_limit

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
