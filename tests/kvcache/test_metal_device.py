from typing import Any

import pytest

from kvcache.metal_device import MetalDevice

SAID: dict[str, Any] = {
    "name": "Apple M3 Pro",
    "families": ["apple9"],
    "recommended_working_set_bytes": 12 << 30,
    "max_buffer_bytes": 9 << 30,
    "missing_for_sparse": ["the device makes no Metal 4 command queue"],
    "missing_for_paged": [],
    "missing_for_dense": [],
}


def test_a_device_is_what_it_says() -> None:
    device = MetalDevice.of(SAID)
    assert device.name == "Apple M3 Pro"
    assert (device.working_set_bytes, device.max_buffer_bytes) == (12 << 30, 9 << 30)
    assert device.missing == {
        "sparse": ("the device makes no Metal 4 command queue",),
        "paged": (),
        "dense": (),
    }
    assert device.said is SAID


@pytest.mark.parametrize("wrong", [{"max_buffer_bytes": "much"}, {"missing_for_paged": "all"}])
def test_a_figure_that_is_none_is_a_bug(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        MetalDevice.of(SAID | wrong)
