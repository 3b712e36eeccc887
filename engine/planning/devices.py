"""Devices by name, as far as a step's time depends on them.

Memory and bandwidth are Apple's own technical specifications, of each chip's largest configuration
(support.apple.com, "Tech Specs" of the Macs with that chip). Apple publishes no arithmetic rate:
``ops_per_s`` is an **estimate**, GPU cores x 128 lanes x 2 operations x clock, with the clocks that
people have measured (github.com/philipturner/metal-benchmarks for M1 and M2; about 1.4 GHz for M3
and 1.6 GHz for M4). For the M5 family it is four times that: Apple's press releases of October 2025
and March 2026 say "over 4x the peak GPU compute for AI" of the family before. These are peaks; real
kernels reach perhaps two thirds of them, so that a planned time is a lower bound.

How much of a Mac's memory its GPU may use is macOS's choice, ``recommendedMaxWorkingSetSize``; so
llama.cpp prints it at start: two thirds of 16 and 32 GiB (10922.67 MiB: llama-cpp-python issue 687,
21845.34: ollama issue 434), three quarters from 36 GiB on (49152 MiB of 64, 73728 of 96: llama.cpp
issues 1870 and 3213). Newer systems allow some more (107.5 GiB of 128: ds4 pull request 893): there
it is a lower bound, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.models.spec import Experts
from engine.planning.memory import VECTOR_BYTES, ModelShape, Packing, kv_bytes_per_token, kv_shape

GIB = 1024**3
KIB = 1024
LANES_PER_CORE = 128
OPS_PER_LANE = 2  # a multiplication and an addition
# From here on a larger part of the memory is the GPU's.
LARGE_MEMORY_BYTES = 36 * GIB

# A step's launches and its Python: an estimate (about 400 kernels of a 36-layer model).
APPLE_STEP_OVERHEAD_S = 2e-3
# One batch of Metal mappings with its round trip, constant from 1 to 2048 tiles: 0.13 to 0.16 ms,
# measured by others on an M1 Max (the "pie" probe).
APPLE_MAPPING_BATCH_S = 0.15e-3
# One mmap(MAP_FIXED) of a memfd: measured on a Linux machine with two Xeon cores.
MMAP_CALL_S = 3.2e-6


@dataclass(frozen=True, slots=True)
class Device:
    """The figures that determine a step's time and a mapping's cost."""

    name: str
    memory_bytes: int
    """The most that it is sold with."""
    bytes_per_s: float
    """Read bandwidth of the memory."""
    ops_per_s: float
    """Multiplications and additions of matrix products."""
    step_overhead_s: float
    """The part of a step's time that does not depend on its size."""
    page_bytes: int
    """The smallest page that it can map."""
    mapping_batch_s: float
    """The fixed time of a batch of mappings."""
    mapping_s: float
    """The time of each mapping in the batch."""
    on_gpu: bool

    def working_set_bytes(self, memory_bytes: int) -> int:
        if not self.on_gpu:
            return memory_bytes
        if memory_bytes < LARGE_MEMORY_BYTES:
            return memory_bytes * 2 // 3
        return memory_bytes * 3 // 4


def _apple(
    name: str, memory_gib: int, gigabytes_per_s: float, cores: int, ghz: float, speed_up: float = 1
) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_gib * GIB,
        bytes_per_s=gigabytes_per_s * 1e9,
        ops_per_s=cores * LANES_PER_CORE * OPS_PER_LANE * ghz * 1e9 * speed_up,
        step_overhead_s=APPLE_STEP_OVERHEAD_S,
        page_bytes=16 * KIB,
        mapping_batch_s=APPLE_MAPPING_BATCH_S,
        mapping_s=0.0,
        on_gpu=True,
    )


# The machine that this project is measured on: two Xeon cores with AVX-512. Bandwidth as its read
# probe has it, operations as OpenBLAS does in float32 there.
CPU = Device(
    name="cpu",
    memory_bytes=24 * GIB,
    bytes_per_s=40e9,
    ops_per_s=200e9,
    step_overhead_s=5e-3,
    page_bytes=4 * KIB,
    mapping_batch_s=0.0,
    mapping_s=MMAP_CALL_S,
    on_gpu=False,
)

DEVICES = (
    _apple("M1", 16, 68.25, 8, 1.278),
    _apple("M1 Pro", 32, 200, 16, 1.296),
    _apple("M1 Max", 64, 400, 32, 1.296),
    _apple("M1 Ultra", 128, 800, 64, 1.296),
    _apple("M2", 24, 100, 10, 1.398),
    _apple("M2 Pro", 32, 200, 19, 1.398),
    _apple("M2 Max", 96, 400, 38, 1.398),
    _apple("M2 Ultra", 192, 800, 76, 1.398),
    _apple("M3", 24, 100, 10, 1.4),
    _apple("M3 Pro", 36, 150, 18, 1.4),
    _apple("M3 Max", 128, 400, 40, 1.4),
    _apple("M3 Ultra", 512, 819, 80, 1.4),
    _apple("M4", 32, 120, 10, 1.58),
    _apple("M4 Pro", 64, 273, 20, 1.58),
    _apple("M4 Max", 128, 546, 40, 1.58),
    _apple("M5", 32, 153, 10, 1.58, speed_up=4),
    _apple("M5 Pro", 64, 307, 20, 1.58, speed_up=4),
    _apple("M5 Max", 128, 614, 40, 1.58, speed_up=4),
    CPU,
)


def device_names() -> list[str]:
    return [device.name for device in DEVICES]


def find_device(name: str) -> Device | None:
    """Return the device of that name; "Apple M4 Pro" and "m4-pro" are "M4 Pro"."""
    wanted = name.lower().removeprefix("apple").replace("-", " ").strip()
    return next((device for device in DEVICES if device.name.lower() == wanted), None)


def this_device() -> Device:
    """Return the device that MLX runs on here, as far as it has a name in the list; a CPU
    otherwise."""
    return find_device(str(mx.device_info().get("device_name", ""))) or CPU


# Operations for each number of a state and each token: it decays, is multiplied by the key and by
# the query, and the key's part is added to it.
STATE_OPS = 7


@dataclass(frozen=True, slots=True)
class CostModel:
    """Bytes and operations of a step of one model on one device.

    A step reads the weights once, however many tokens it computes, but of experts only those that
    its tokens choose, as if at random; the K and V of every sequence up to its last token; and its
    states, which it writes as well.
    Activations stay in caches and are not counted.
    """

    device: Device
    weights_bytes: int
    """Read by every step: of all but experts."""
    kv_bytes_per_token: int
    ops_per_token: int
    """Of the matrices that multiply every token."""
    ops_per_row: int
    """Of the logits, which only an entry's last token needs."""
    ops_per_pair: int
    """Of attention, for each pair of a token and a token that it sees."""
    mixtures: tuple[tuple[Experts, int], ...] = ()
    """The mixture of each layer that has one, and the bytes of one expert."""
    state_bytes: int = 0
    """A sequence's states, which a step reads and writes."""

    @classmethod
    def of(cls, shape: ModelShape, device: Device, weights: Packing, kv: Packing) -> "CostModel":
        """Return the cost of a model whose weights and cache are packed like that."""
        spec = shape.spec
        embedding = spec.vocab_size * spec.hidden_size
        layers = shape.matrix_numbers - embedding * (1 if spec.tied_embeddings else 2)
        mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts)]
        one = [3 * mixture.inner_size * spec.hidden_size for mixture in mixtures]
        experts = sum(mixture.experts * size for mixture, size in zip(mixtures, one, strict=True))
        active = sum(mixture.chosen * size for mixture, size in zip(mixtures, one, strict=True))
        return cls(
            device=device,
            # A step reads only a few rows of an embedding that is not the output matrix as well.
            weights_bytes=weights.bytes_of(layers - experts + embedding)
            + VECTOR_BYTES * shape.vector_numbers,
            kv_bytes_per_token=kv_bytes_per_token(shape, kv),
            ops_per_token=2 * (layers - experts + active)
            + sum(STATE_OPS * net.values_width * net.key_dim for net in spec.recurrences),
            ops_per_row=2 * embedding,
            ops_per_pair=sum(
                4 * attention.heads * attention.head_dim for attention in spec.attentions
            ),
            mixtures=tuple(
                (mixture, weights.bytes_of(size))
                for mixture, size in zip(mixtures, one, strict=True)
            ),
            state_bytes=sum(state.state_bytes for state in kv_shape(shape).states),
        )

    def weights_read(self, tokens: int) -> float:
        """Return the bytes of weights that a step of that many tokens reads."""
        return self.weights_bytes + sum(
            mixture.distinct(tokens) * size for mixture, size in self.mixtures
        )

    def step_seconds(self, plan: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step that computes tokens [start, start + count) of each
        sequence."""
        tokens = sum(count for _, count in plan)
        # Everything up to the last token is read, and the new tokens are written before that.
        touched = sum(start + 2 * count for start, count in plan)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in plan)
        bytes_moved = self.weights_read(tokens) + self.kv_bytes_per_token * touched
        bytes_moved += 2 * self.state_bytes * len(plan)
        ops = self.ops_per_token * tokens + self.ops_per_row * len(plan) + self.ops_per_pair * pairs
        device = self.device
        return device.step_overhead_s + max(
            bytes_moved / device.bytes_per_s, ops / device.ops_per_s
        )
