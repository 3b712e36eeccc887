"""What this machine's Metal device says of itself."""

from dataclasses import dataclass, field

from kvcache.substrates import Substrate


@dataclass(frozen=True, slots=True)
class MetalDevice:
    """The default device. Sizes in bytes."""

    name: str
    working_set_bytes: int
    """Memory that the driver recommends a process to use at most."""
    max_buffer_bytes: int
    """The largest allocation."""
    said: dict[str, bool | int | str | list[str]] = field(default_factory=dict)
    """All that it says, for people."""
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By substrate, what the device lacks for it."""

    @classmethod
    def of(cls, said: dict[str, bool | int | str | list[str]]) -> "MetalDevice":
        """said: what ``metal_ext.metal_capabilities`` gives where there is a device."""
        missing: dict[str, tuple[str, ...]] = {}
        for kind in (Substrate.SPARSE, Substrate.PAGED, Substrate.METAL_DENSE):
            lacks = said[f"missing_for_{kind.setting}"]
            assert isinstance(lacks, list)
            missing[kind.setting] = tuple(lacks)
        return cls(
            name=str(said["name"]),
            working_set_bytes=_number(said, "recommended_working_set_bytes"),
            max_buffer_bytes=_number(said, "max_buffer_bytes"),
            said=said,
            missing=missing,
        )


def _number(said: dict[str, bool | int | str | list[str]], name: str) -> int:
    value = said[name]
    assert isinstance(value, int)
    return value
