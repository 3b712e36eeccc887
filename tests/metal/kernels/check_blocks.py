"""zero_blocks and copy_blocks: the same bytes of every region, and no others."""

import numpy as np
import pytest

from tests.metal.kernels.device import Device, struct
from tests.metal.kernels.memory import PAGE, Addresses

pytestmark = pytest.mark.small

REGIONS = 5
STRIDE = 3 * PAGE  # of regions; only the middle page of each has memory


class Regions:
    """The middle pages of five regions, each byte a figure of its own."""

    def __init__(self) -> None:
        self.addresses = Addresses(REGIONS * STRIDE)
        self.pages = [self.addresses.give(r * STRIDE + PAGE, PAGE) for r in range(REGIONS)]
        self.start = self.addresses.start + PAGE
        for region, page in enumerate(self.pages):
            page[:] = np.arange(PAGE) % 251 + region

    def copies(self) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        return [page.copy() for page in self.pages]


@pytest.mark.parametrize("bytes_", [16, 1040, PAGE])
@pytest.mark.parametrize("whole", [False, True], ids=["threads", "threadgroups"])
def test_zeroing_clears_the_bytes_of_every_region(device: Device, bytes_: int, whole: bool) -> None:
    target = Regions()
    before = target.copies()
    arguments = struct("BlockArguments", 0, target.start, 0, STRIDE, bytes_, REGIONS - 1, 0)
    if whole:
        device.threadgroups("zero_blocks", [arguments], (PAGE // 16 // 64, REGIONS), (64, 2))
    else:
        device.threads("zero_blocks", [arguments], (bytes_ // 16, REGIONS - 1), (64, 2))
    for region, (now, was) in enumerate(zip(target.pages, before, strict=True)):
        cleared = bytes_ if region < REGIONS - 1 else 0
        assert not now[:cleared].any()
        assert np.array_equal(now[cleared:], was[cleared:])


@pytest.mark.parametrize("bytes_", [16, 1040, PAGE])
def test_copying_takes_the_bytes_of_every_region_to_the_other_block(
    device: Device, bytes_: int
) -> None:
    source, target = Regions(), Regions()
    for page in target.pages:
        page[:] = 255
    kept = source.copies()
    both = (source.start, target.start, STRIDE, STRIDE)
    arguments = struct("BlockArguments", *both, bytes_, REGIONS - 1, 0)
    device.threads("copy_blocks", [arguments], (bytes_ // 16, REGIONS - 1), (64, 2))
    for region, (now, was) in enumerate(zip(target.pages, kept, strict=True)):
        copied = bytes_ if region < REGIONS - 1 else 0
        assert np.array_equal(now[:copied], was[:copied])
        assert (now[copied:] == 255).all()
        assert np.array_equal(source.pages[region], was)


def test_copying_between_regions_that_lie_differently_far_apart(device: Device) -> None:
    source, target = Regions(), Addresses(REGIONS * PAGE)
    memory = target.give(0, REGIONS * PAGE)
    arguments = struct("BlockArguments", source.start, target.start, STRIDE, PAGE, PAGE, REGIONS, 0)
    device.threads("copy_blocks", [arguments], (PAGE // 16, REGIONS), (256, 1))
    assert np.array_equal(memory, np.concatenate(source.pages))
