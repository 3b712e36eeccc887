"""How large a cache is that serving would make, for a trial's command line."""

import json
from dataclasses import asdict, dataclass

from kvcache.layout import KVShape


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a model's cache is made of."""

    shape: KVShape
    max_tokens: int
    """Of one sequence."""
    heap_bytes: int
    buffers: int
    """Address ranges that there may be at once."""

    def to_argument(self) -> str:
        """For a trial's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> "CacheSize":
        """Reads what ``to_argument`` wrote."""
        said = json.loads(argument)
        return cls(**said | {"shape": KVShape(**said["shape"])})


# Of Qwen3-4B with all of its context, where no model is named: 5.6 GiB of addresses a buffer.
USUAL = CacheSize(KVShape(36, 8, 128, 2), max_tokens=40960, heap_bytes=64 << 20, buffers=64)
