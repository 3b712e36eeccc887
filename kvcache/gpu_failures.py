"""Kinds of failures of a GPU, told apart by the words of Metal's error messages."""

import re
from enum import Enum

SHORTER = "takes shorter steps"
AVOIDED = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in the server's environment, or a closed lid, avoids it"


class GPUFailure(Enum):
    """A kind of failure. ``words`` is a pattern for Metal's name or description of the error;
    ``cause`` and ``next_start`` (what the server's next start does) are for people."""

    KV_MEMORY = (
        "PageFault|Address Fault",
        "the GPU met memory of K and V that is not mapped",
        "uses another KV backend",
    )
    INTERACTIVITY = (
        "Impacting ?Interactivity",
        f"macOS stopped the GPU's work because it held up the display; {AVOIDED}",
        SHORTER,
    )
    TIMEOUT = (
        "ErrorTimeout|GPU Timeout|ErrorHang|GPU Hang",
        f"macOS stopped the GPU's work because it took too long; {AVOIDED}",
        SHORTER,
    )
    OUT_OF_MEMORY = (
        "OutOfMemory|Insufficient Memory",
        "the GPU has run out of memory",
        "computes fewer tokens at a time",
    )
    # These follow another failure, of this process or of another one.
    IGNORED = (
        r"SubmissionsIgnored|Ignored \(for causing|InnocentVictim|Discarded \(victim",
        "the GPU refuses work after an earlier failure",
        "gets a new queue of the GPU",
    )

    def __init__(self, words: str, cause: str, next_start: str) -> None:
        self.words, self.cause = words, cause
        self.advice = f"{cause}; the server's next start {next_start}: send the request again then"

    @classmethod
    def of(cls, message: str) -> "GPUFailure | None":
        """Return the kind that a message names, or None. A cause comes before its consequence."""
        return next((kind for kind in cls if re.search(kind.words, message)), None)
