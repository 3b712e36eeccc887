"""What Metal's errors mean, by the texts that Macs have reported."""

import pytest

from kvcache.backends.faults import GPUFailure

NAME = "kIOGPUCommandBufferCallbackError"
# Metal's words, with the driver's names of macOS 12 and later, and of earlier systems.
TEXTS = {
    f"Impacting Interactivity (0000000e:{NAME}ImpactingInteractivity)": GPUFailure.INTERACTIVITY,
    f"Caused GPU Timeout Error (00000002:{NAME}Timeout)": GPUFailure.TIMEOUT,
    "Caused GPU Timeout Error (IOAF code 2)": GPUFailure.TIMEOUT,
    f"Caused GPU Hang Error (00000003:{NAME}Hang)": GPUFailure.TIMEOUT,
    f"Insufficient Memory (00000008:{NAME}OutOfMemory)": GPUFailure.OUT_OF_MEMORY,
    f"Ignored (for causing prior/excessive GPU errors) (00000004:{NAME}SubmissionsIgnored)": (
        GPUFailure.IGNORED
    ),
    f"Discarded (victim of GPU error/recovery) (00000005:{NAME}InnocentVictim)": GPUFailure.IGNORED,
    f"Caused GPU Address Fault Error (0000000b:{NAME}PageFault)": GPUFailure.KV_MEMORY,
    f"Internal Error (0000000e:{NAME}Internal)": None,
    "the GPU did not finish within 3000 ms: 2 mapping operations": None,
}


@pytest.mark.parametrize(("text", "failure"), TEXTS.items())
def test_every_text_of_metals_is_known_by_its_name_and_by_its_description(
    text: str, failure: GPUFailure | None
) -> None:
    description, _, name = text.partition(" (0")
    for words in (f"[METAL] Command buffer execution failed: {text}.", description, name or text):
        assert GPUFailure.of(words) is failure
    # A failure comes before its consequence, and quire's own words change nothing.
    ignored = f"{GPUFailure.IGNORED.advice} ({NAME}SubmissionsIgnored); {text}"
    assert GPUFailure.of(ignored) is (failure or GPUFailure.IGNORED)
