"""The memory of known devices, their peak rates, and the parts of them that kernels reach.

Memory and bandwidth are Apple's specifications of each chip's largest configuration
(support.apple.com, "Tech Specs"), and of smaller ones with a lower bandwidth. Apple publishes no
arithmetic rate: ``ops_per_s`` is an **estimate**, GPU cores x 128 lanes x 2 operations x clock.
Clocks are measured for M1 and M2 (github.com/philipturner/metal-benchmarks), and about 1.4 GHz for
M3 and 1.6 GHz for M4. The rates of M5 and M6 are multiplied by four, after Apple's "over 4x the
peak GPU compute for AI" (press releases of October 2025 and March 2026).

macOS limits the GPU's part of the memory (``recommendedMaxWorkingSetSize``): to two thirds in Macs
with 16 or 32 GiB (llama-cpp-python issue 687, ollama issue 434), and to three quarters from 36 GiB
on (llama.cpp issues 1870, 3213). Newer systems allow more (107.5 GiB of 128: ds4 pull request 893).
"""

from dataclasses import dataclass, replace

import mlx.core as mx

from kvcache.backends.choice import ADDRESS_BITS, EARLY_ADDRESS_BITS
from metal_ext.loading import LARGER_BUFFERS

GIB = 1024**3
KIB = 1024
OPS_PER_CORE = 2 * 128  # a multiplication and an addition in each lane
# From this memory size on, macOS gives the GPU three quarters of the memory, not two thirds.
LARGE_MEMORY_BYTES = 36 * GIB


@dataclass(frozen=True, slots=True)
class Rates:
    """The parts of a device's rates that kernels reach, and times that do not depend on sizes."""

    read_share: float = 1.0  # of bytes_per_s: weights
    expert_read_share: float = 1.0  # of read_share: the experts of one token
    few_rows: int = 0  # the most rows for which MLX multiplies vectors; for more, tiles of rows
    vector_share: float = 1.0  # of ops_per_s: products of vectors
    tile_share: float = 1.0  # of ops_per_s: products of tiles
    tile_rows: int = 1
    command_s: float = 0.0  # between two commands if the second waits for the first
    buffer_s: float = 0.0  # between two command buffers
    buffer_commands: int = 1
    step_s: float = 0.0  # between two steps


@dataclass(frozen=True, slots=True)
class Device:
    """The memory and speed of a device. They decide which models fit, and how fast steps run."""

    name: str
    memory_bytes: int
    """The machine's memory. In DEVICES, that of the device's largest configuration."""
    bytes_per_s: float
    """The bandwidth of reads from memory."""
    ops_per_s: float
    """The rate of multiplications and additions in matrix products."""
    page_bytes: int
    """The smallest page that the device can map."""
    on_gpu: bool
    rates: Rates
    address_bytes: int | None = None
    """The addresses that a process has on the GPU; None on a CPU."""
    smaller: "Device | None" = None
    """The chip with fewer GPU cores, in Macs with at most ``smaller.memory_bytes`` of memory."""
    gpu_bytes: int | None = None
    """The memory that the GPU's driver says that it may use; None if there is no driver to ask."""

    def with_memory(self, memory_bytes: int, gpu_bytes: int | None = None) -> "Device":
        """Return the configuration of this chip in Macs with ``memory_bytes`` of memory."""
        smaller = self.smaller
        chip = smaller if smaller is not None and memory_bytes <= smaller.memory_bytes else self
        return replace(chip, memory_bytes=memory_bytes, gpu_bytes=gpu_bytes)

    @property
    def working_set_bytes(self) -> int:
        """The memory that the device may use."""
        if not self.on_gpu:
            return self.memory_bytes
        large = self.memory_bytes >= LARGE_MEMORY_BYTES
        usual = self.memory_bytes * 3 // 4 if large else self.memory_bytes * 2 // 3
        return usual if self.gpu_bytes is None else self.gpu_bytes


# Measured by others; "the sweep" is mlxcel's of mlx-lm (benchmarks/pylm_m5max_2026-09-06.csv).
# Weights: 0.93 mlx#3852, 0.97 mlx#3863, 0.90 the sweep's slope from 4B to 32B. Two dies read less:
# M1 by the sweep, M3 650 to 692 of 819 GB/s (inferencer-feedback#300, omlx#2238), M2 between them.
# Experts of one token: 387 of 655 GB/s on an M3 Ultra, 542 for four tokens (mlx#4509); half of the
# cores do better. Vectors: 8 rows take 3.4 times one row's time with mlx 0.31.2 (mlx#3839), less
# with 0.32 on M3 and newer (mlx#3863, mlx#3852). Tiles: the same, mlx-lm's BENCHMARKS.md,
# mlx-lm#1569; M5 and Ultras by the sweep. Rows: MLX's quantized.cpp; few_rows for middle sizes.
# Commands: M1 116 us a layer with 0.4 buffers and M5 36 us (the sweep), M2 mlx#1561, M3 2.4 us if
# empty (mlx#4521), M4 BENCHMARKS.md. Buffers: M1 58.2 to 91.4 tokens/s, 54 fewer (vllm-metal#637),
# M2 mlx#1561, M3 and M4 20 us (mlx#4521), M5 1.7 % at most (mlxcel#358).
M5 = Rates(0.89, 0.72, 25, 0.31 / 4, 0.66, 64, 2.2e-6, 2e-6, 50)  # vectors use no matrix units
LARGER = int(LARGER_BUFFERS["MLX_MAX_OPS_PER_BUFFER"])  # commands, on M1 to M4
RATES = {
    "M1": Rates(0.89, 0.72, 10, 0.26, 0.78, 32, 5.0e-6, 115e-6, LARGER),
    "M1 Ultra": Rates(0.65, 0.6, 18, 0.26, 0.4, 32, 5.0e-6, 115e-6, LARGER),
    "M2": Rates(0.89, 0.72, 10, 0.26, 0.78, 32, 3.5e-6, 38e-6, LARGER),
    "M2 Ultra": Rates(0.72, 0.6, 18, 0.26, 0.4, 32, 3.5e-6, 38e-6, LARGER),
    "M3": Rates(0.89, 0.72, 15, 0.31, 0.78, 32, 3.6e-6, 20e-6, LARGER),
    "M3 Ultra": Rates(0.8, 0.6, 18, 0.31, 0.4, 32, 3.6e-6, 20e-6, LARGER),
    "M4": Rates(0.89, 0.72, 15, 0.31, 0.78, 32, 3.0e-6, 20e-6, LARGER),
    "M5": M5,
    "M5 Ultra": replace(M5, read_share=0.8, expert_read_share=0.6, few_rows=18, tile_share=0.4),
    "M6": M5,
}


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
        ops_per_s=cores * OPS_PER_CORE * ghz * 1e9 * speed_up,
        page_bytes=16 * KIB,
        on_gpu=True,
        rates=RATES.get(name) or RATES[name[:2]],
        address_bytes=1 << (EARLY_ADDRESS_BITS if name[:2] in ("M1", "M2") else ADDRESS_BITS),
        smaller=None if smaller is None else _apple(name, *smaller, ghz, speed_up),
    )


# The project's test machine, two Xeon cores with AVX-512. The bandwidth was measured by a read
# probe, the operations by OpenBLAS in float32, the last by the demo model's steps of 0.6 ms.
CPU = Device(
    name="cpu",
    memory_bytes=24 * GIB,
    bytes_per_s=40e9,
    ops_per_s=200e9,
    page_bytes=4 * KIB,
    on_gpu=False,
    rates=Rates(step_s=0.5e-3),
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


def find_device(name: str) -> Device | None:
    """Return the device with this name. "Apple M4 Pro" and "m4-pro" also find "M4 Pro"."""
    wanted = name.lower().removeprefix("apple").replace("-", " ").strip()
    return next((device for device in DEVICES if device.name.lower() == wanted), None)


def this_device() -> Device:
    """Return the entry of DEVICES for MLX's device on this machine, or CPU if there is none."""
    return find_device(str(mx.device_info().get("device_name", ""))) or CPU
