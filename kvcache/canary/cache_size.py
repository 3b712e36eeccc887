"""How large a cache is that serving would make, for a trial's command line."""

import json
from dataclasses import asdict, dataclass

from kvcache.layout import KVFormat, KVShape, KVSpec


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What the cache of a model's layers of one kind is made of."""

    num_layers: int
    spec: KVSpec
    max_tokens: int
    """Of one sequence."""
    heap_bytes: int
    buffers: int
    """Address ranges that there may be at once."""

    def to_argument(self) -> str:
        """For a trial's command line."""
        spec = self.spec
        numbers = asdict(self) | {"spec": [spec.kv_heads, spec.head_dim, spec.format.value]}
        return json.dumps(numbers)

    @classmethod
    def from_argument(cls, argument: str) -> "CacheSize":
        """Reads what ``to_argument`` wrote."""
        said = json.loads(argument)
        kv_heads, head_dim, name = said["spec"]
        return cls(**said | {"spec": KVSpec(kv_heads, head_dim, KVFormat(name))})

    @property
    def shape(self) -> KVShape:
        """Return the shape of these layers alone."""
        return KVShape.uniform(self.num_layers, self.spec)


# Of Qwen3-4B with all of its context, where no model is named: 5.6 GiB of addresses a buffer.
USUAL = CacheSize(36, KVSpec(8, 128), max_tokens=40960, heap_bytes=64 << 20, buffers=64)
