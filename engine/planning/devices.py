"""The speed and memory of known devices, and the time of a model's step on each device.

Memory and bandwidth are Apple's specifications of each chip's largest configuration
(support.apple.com, "Tech Specs"), and of smaller ones with a lower bandwidth. Apple publishes no
arithmetic rate: ``ops_per_s`` is an **estimate**, GPU cores x 128 lanes x 2 operations x clock.
Clocks are measured for M1 and M2 (github.com/philipturner/metal-benchmarks), and about 1.4 GHz for
M3 and 1.6 GHz for M4. The rates of M5 and M6 are multiplied by four, after Apple's "over 4x the
peak GPU compute for AI" (press releases of October 2025 and March 2026). Real kernels reach perhaps
two thirds of these peaks, so planned times are lower bounds.

macOS limits the GPU's part of the memory (``recommendedMaxWorkingSetSize``): to two thirds in Macs
with 16 or 32 GiB (llama-cpp-python issue 687, ollama issue 434), and to three quarters from 36 GiB
on (llama.cpp issues 1870, 3213). Newer systems allow more (107.5 GiB of 128: ds4 pull request 893).
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
# From this memory size on, macOS gives the GPU three quarters of the memory, not two thirds.
LARGE_MEMORY_BYTES = 36 * GIB

# The estimated time that a step of 36 layers takes to run Python code and launch 400 kernels.
APPLE_STEP_OVERHEAD_S = 2e-3


@dataclass(frozen=True, slots=True)
class Device:
    """The memory and speed of a device. They decide which models fit, and how fast steps run."""

    name: str
    memory_bytes: int
    """The memory of the device's largest configuration."""
    bytes_per_s: float
    """The bandwidth of reads from memory."""
    ops_per_s: float
    """The rate of multiplications and additions in matrix products."""
    step_overhead_s: float
    """The part of a step's time that does not depend on the step's size."""
    page_bytes: int
    """The smallest page that the device can map."""
    on_gpu: bool
    smaller: "Device | None" = None
    """The chip with fewer GPU cores, in Macs with at most ``smaller.memory_bytes`` of memory."""

    def with_memory(self, memory_bytes: int) -> "Device":
        """Return the configuration of this chip in Macs with ``memory_bytes`` of memory."""
        smaller = self.smaller
        return smaller if smaller is not None and memory_bytes <= smaller.memory_bytes else self

    def working_set_bytes(self, memory_bytes: int) -> int:
        if not self.on_gpu:
            return memory_bytes
        if memory_bytes < LARGE_MEMORY_BYTES:
            return memory_bytes * 2 // 3
        return memory_bytes * 3 // 4


def _apple(
    name: str,
    memory_gib: int,
    gigabytes_per_s: float,
    cores: int,
    ghz: float,
    speed_up: float = 1,
    *,
    smaller: tuple[int, float, int] | None = None,
) -> Device:
    """smaller: memory, bandwidth and cores of the smaller configuration."""
    return Device(
        name=name,
        memory_bytes=memory_gib * GIB,
        bytes_per_s=gigabytes_per_s * 1e9,
        ops_per_s=cores * LANES_PER_CORE * OPS_PER_LANE * ghz * 1e9 * speed_up,
        step_overhead_s=APPLE_STEP_OVERHEAD_S,
        page_bytes=16 * KIB,
        on_gpu=True,
        smaller=None if smaller is None else _apple(name, *smaller, ghz, speed_up),
    )


# The project's test machine, two Xeon cores with AVX-512. The bandwidth was measured by a read
# probe, the operations by OpenBLAS in float32, the overhead by the demo model's steps of 0.6 ms.
CPU = Device(
    name="cpu",
    memory_bytes=24 * GIB,
    bytes_per_s=40e9,
    ops_per_s=200e9,
    step_overhead_s=0.5e-3,
    page_bytes=4 * KIB,
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
    _apple("M3 Max", 128, 400, 40, 1.4, smaller=(36, 300, 30)),
    _apple("M3 Ultra", 512, 819, 80, 1.4),
    _apple("M4", 32, 120, 10, 1.58),
    _apple("M4 Pro", 64, 273, 20, 1.58),
    _apple("M4 Max", 128, 546, 40, 1.58, smaller=(36, 410, 32)),
    _apple("M5", 32, 153, 10, 1.58, speed_up=4),
    _apple("M5 Pro", 64, 307, 20, 1.58, speed_up=4),
    _apple("M5 Max", 128, 614, 40, 1.58, speed_up=4, smaller=(36, 460, 32)),
    _apple("M5 Ultra", 512, 1200, 80, 1.58, speed_up=4),
    _apple("M6", 32, 170, 12, 1.58, speed_up=4, smaller=(24, 153, 12)),
    CPU,
)


def device_names() -> list[str]:
    return [device.name for device in DEVICES]


def find_device(name: str) -> Device | None:
    """Return the device with this name. "Apple M4 Pro" and "m4-pro" also find "M4 Pro"."""
    wanted = name.lower().removeprefix("apple").replace("-", " ").strip()
    return next((device for device in DEVICES if device.name.lower() == wanted), None)


def this_device() -> Device:
    """Return the entry of DEVICES for MLX's device on this machine, or CPU if there is none."""
    return find_device(str(mx.device_info().get("device_name", ""))) or CPU


# A token's operations on each number of a recurrent state: decay, two products, and update.
STATE_OPS = 7


@dataclass(frozen=True, slots=True)
class CostModel:
    """Computes how long a step of one model takes on one device, from bytes and operations.

    A step reads all weights once, except experts that no token chooses (by random choices). A
    step reads K and V, and reads and writes recurrent states. Activations are not counted.
    """

    device: Device
    weights_bytes: int
    """The bytes of weights that every step reads, which are all weights except experts."""
    kv_bytes_per_token: int
    ops_per_token: int
    """The operations per token of all matrices but the output head."""
    ops_per_row: int
    """The operations of the output head, which runs for one token of each sequence only."""
    ops_per_pair: int
    """The operations of attention for each pair of tokens, one of which attends to the other."""
    mixtures: tuple[tuple[Experts, int], ...] = ()
    """For each layer with experts, the mixture of experts and the bytes of one expert."""
    state_bytes: int = 0
    """The bytes of one sequence's recurrent states."""

    @classmethod
    def of(cls, shape: ModelShape, device: Device, weights: Packing) -> "CostModel":
        spec = shape.spec
        embedding = spec.vocab_size * spec.hidden_size
        layers = shape.matrix_numbers - embedding * (1 if spec.tied_embeddings else 2)
        mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts)]
        one = [3 * mixture.inner_size * spec.hidden_size for mixture in mixtures]
        experts = sum(mixture.experts * size for mixture, size in zip(mixtures, one, strict=True))
        active = sum(mixture.chosen * size for mixture, size in zip(mixtures, one, strict=True))
        return cls(
            device=device,
            # Count the embedding's matrix once, as the output head: a lookup reads only a few rows.
            weights_bytes=weights.bytes_of(layers - experts + embedding)
            + VECTOR_BYTES * shape.vector_numbers,
            kv_bytes_per_token=kv_bytes_per_token(shape),
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
        return self.weights_bytes + sum(
            mixture.distinct(tokens) * size for mixture, size in self.mixtures
        )

    def step_seconds(self, plan: Sequence[tuple[int, int]]) -> float:
        """Return a step's time. ``plan`` has ``(start, count)`` of each sequence's new tokens."""
        tokens = sum(count for _, count in plan)
        # The step reads K and V of start + count tokens, and writes K and V of count tokens.
        touched = sum(start + 2 * count for start, count in plan)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in plan)
        bytes_moved = self.weights_read(tokens) + self.kv_bytes_per_token * touched
        bytes_moved += 2 * self.state_bytes * len(plan)
        ops = self.ops_per_token * tokens + self.ops_per_row * len(plan) + self.ops_per_pair * pairs
        device = self.device
        return device.step_overhead_s + max(
            bytes_moved / device.bytes_per_s, ops / device.ops_per_s
        )
