"""What can stand under K and V, by name."""

from enum import Enum


class Substrate(Enum):
    """The name that settings use, and whether it is memory of the GPU."""

    SPARSE = ("sparse", True)
    """Placement sparse buffers: pages mapped behind addresses of the GPU."""
    PAGED = ("paged", True)
    """Ordinary buffers, and a page table that the kernels read."""
    METAL_DENSE = ("dense", True)
    """One buffer, of which every sequence has a slice."""
    POSIX = ("posix", False)
    """Pages of shared memory mapped behind reserved addresses."""

    @property
    def setting(self) -> str:
        """What a person calls it."""
        return self.value[0]

    @property
    def on_gpu(self) -> bool:
        """Whether MLX must compute on the GPU."""
        return self.value[1]

    @property
    def is_dense(self) -> bool:
        """Whether a block is a whole context, and nothing is shared."""
        return self.setting == "dense"

    def __str__(self) -> str:
        return f"{self.setting} on Metal" if self.on_gpu else self.setting
