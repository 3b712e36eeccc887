"""Settings of the cache: the table [cache] of the settings file."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge

MIB = 1024**2
T = TypeVar("T")
FIXED = "no setting"
Fixed = Annotated[T, FIXED]
"""Marks a field that is no setting: only tests change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of the memory of K and V. quire replaces None by its own choice at start."""

    kv_backend: Literal["auto", "sparse", "paged", "dense", "posix"] = "auto"
    release_heaps: bool | None = None
    """Whether a GPU releases heaps before the process ends. None means: only if the release test
    has passed."""
    map_while_running: bool | None = None
    """Whether a GPU's sparse buffers may be mapped and unmapped while steps run."""
    kv_budget_bytes: int | None = None
    headroom_bytes: int | None = None
    """Memory that is left to other programs."""
    page_bytes: int | None = None
    heap_bytes: int = 64 * MIB
    free_slack_bytes: int = 256 * MIB
    """Memory of free blocks that is kept for the next sequences, at least one heap."""
    idle_release_s: Annotated[float, Ge(0)] = 2.0
    """Idle time after which free memory, except one heap, goes back to the system."""
    prefix_cache: bool = True
    prefix_keep_s: Annotated[float, Ge(0)] = 1800.0
    """Idle time after which cached prefixes are forgotten."""
    disk_bytes: Annotated[int, Ge(0)] | None = None
    """The most bytes of prefixes in files; None means a tenth of the free space, at most 16 GiB; 0
    means that none are kept."""
    disk_folder: str | None = None
    """The folder of these files; None means one in the user's cache folder."""
    disk_hourly_bytes: Annotated[int, Ge(0)] = 8 * 1024 * MIB
    """The most bytes that all processes write to the folder in an hour."""
    max_sharers: Fixed[int] = 1024
    """The most buffers that may map the same block; the counter of macOS overflows at 2048."""
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
