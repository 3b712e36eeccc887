"""What Metal's errors mean, by the texts that Macs have reported."""

import pytest

from kvcache.gpu_failures import GPUFailure

NAME = "kIOGPUCommandBufferCallbackError"
# Metal's words, with the driver's names of macOS 12 and later, and of earlier systems.
TEXTS = {
    f"Impacting Interactivity (0000000e:{NAME}ImpactingInteractivity)": GPUFailure.INTERACTIVITY,
    f"Caused GPU Timeout Error (00000002:{NAME}Timeout)": GPUFailure.TIMEOUT,
    "Caused GPU Timeout Error (IOAF code 2)": GPUFailure.TIMEOUT,
    f"Caused GPU Hang Error (00000003:{NAME}Hang)": GPUFailure.TIMEOUT,
    f"Insufficient Memory (00000008:{NAME}OutOfMemory)": GPUFailure.OUT_OF_MEMORY,
    "Insufficient Memory (IOAF code 8)": GPUFailure.OUT_OF_MEMORY,
    f"Ignored (for causing prior/excessive GPU errors) (00000004:{NAME}SubmissionsIgnored)": (
        GPUFailure.IGNORED
    ),
    "Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOAccelCommandBufferCallbackErrorSubmissionsIgnored)": GPUFailure.IGNORED,
    f"Discarded (victim of GPU error/recovery) (00000005:{NAME}InnocentVictim)": GPUFailure.IGNORED,
    f"Caused GPU Address Fault Error (0000000b:{NAME}PageFault)": GPUFailure.KV_MEMORY,
}


@pytest.mark.parametrize(("text", "failure"), TEXTS.items())
def test_every_text_of_metals_is_known_by_its_name_and_by_its_description(
    text: str, failure: GPUFailure
) -> None:
    assert GPUFailure.of(f"[METAL] Command buffer execution failed: {text}.") is failure
    description, name = text.rsplit(" (", 1)
    assert GPUFailure.of(description) is failure
    assert NAME not in name or GPUFailure.of(name) is failure


@pytest.mark.parametrize(
    "text",
    [
        "",
        "an error that the driver does not explain",
        f"Internal Error (0000000e:{NAME}Internal)",
        "the first mapping took over 20 s",
        "the GPU did not finish within 3000 ms: 2 mapping operations",
        "[metal::malloc] Unable to allocate 8 bytes",
    ],
)
def test_other_texts_are_no_failure_of_a_known_kind(text: str) -> None:
    assert GPUFailure.of(text) is None


def test_a_cause_comes_before_its_consequence() -> None:
    ignored = GPUFailure.IGNORED.cause + next(t for t, k in TEXTS.items() if k.name == "IGNORED")
    for text, failure in TEXTS.items():
        assert GPUFailure.of(f"{ignored}; {text}") is failure
        assert GPUFailure.of(f"{failure.advice} ({text})") is failure
