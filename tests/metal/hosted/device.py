"""What may be excused on this machine's GPU, and what may not."""

import metal_ext

REDUCTIONS = "apple7"
"""The first family of Apple's GPUs that adds up across a simdgroup in one step. Virtual machines
report older ones, and refuse kernels that do it."""


def lacks(kind: str) -> list[str]:
    """What a backend needs and this machine has not, in words; empty where it can be tried."""
    if not metal_ext.HAS_METAL:
        return ["this build has no Metal"]
    missing = metal_ext.metal_capabilities().get(f"missing_for_{kind}", ["there is no device"])
    assert isinstance(missing, list)
    return missing


def may_refuse_kernels() -> bool:
    """Whether the device is one that cannot run them all."""
    families = metal_ext.metal_capabilities().get("families", [])
    assert isinstance(families, list)
    return REDUCTIONS not in families
