"""File descriptors: every connection takes one, and every heap of a CPU's cache."""

from engine.machine import raise_descriptor_limit

# Heaps, sockets of our own, the model's files, the log, and what libraries have open. Where there
# are few, it is half of them, but what a server has open that serves nobody.
OTHER_DESCRIPTORS = 256
FEWEST_OTHER_DESCRIPTORS = 32


def connections_that_fit(connections: int) -> int:
    """Raise this process's limit of file descriptors. Return how many of the wanted connections
    fit, at least one, when as many again are being refused."""
    allowed = raise_descriptor_limit()
    others = min(OTHER_DESCRIPTORS, max(FEWEST_OTHER_DESCRIPTORS, allowed // 2))
    return max(1, min(connections, (allowed - others) // 2))
