"""The roofline sheet of METAL.md: ``python -m tests.metal.roofline [--check]`` writes or checks it.

Limits are what memory bandwidth and arithmetic allow, at their peak (engine/planning/devices.py):
no machine reaches them, and none was measured.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.planning.arithmetic import BF16, Q4
from engine.planning.cost import CostModel
from engine.planning.devices import Device, find_device
from engine.planning.shape import ModelShape, read_shape
from kvcache.layout import KVFormat
from tests.metal.sheets import Section, table, three
from tests.models import QWEN3_4B, ModelSpec, write_config

KIB = 1024
SECTION = Section("roofline")

# Huggingface's Qwen/Qwen3-0.6B and Qwen/Qwen3-8B.
MODELS: dict[str, ModelSpec] = {
    "0.6B": replace(
        QWEN3_4B,
        num_hidden_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=3072,
    ),
    "4B": QWEN3_4B,
    "8B": replace(QWEN3_4B, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}
DEVICES = ("M1", "M2 Pro", "M3 Max", "M4 Max", "M5")
CONTEXTS = (1 * KIB, 8 * KIB, 32 * KIB)
SEQUENCES = (1, 8, 32)
PAGES = (16 * KIB, 64 * KIB, 256 * KIB)
CHUNK = 256
ELEMENT_BYTES = 2  # of K, V and queries: bfloat16


@dataclass(frozen=True, slots=True)
class Limit:
    """The most tokens per second of so many decoding sequences."""

    tokens_per_s: float
    by_arithmetic: bool
    """Else by memory bandwidth."""


def shapes(models: Mapping[str, ModelSpec] = MODELS) -> dict[str, ModelShape]:
    """Models, as their config.json has them."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: read_shape(write_config(Path(folder) / name, spec))
            for name, spec in models.items()
        }


def device(name: str) -> Device:
    """A device of the list."""
    found = find_device(name)
    assert found is not None, name
    return found


def decode_bytes(shape: ModelShape, context: int, sequences: int) -> int:
    """What one decode step reads: 4-bit weights once, K and V of every sequence in bfloat16."""
    cost = CostModel.of(shape, device("M1"), Q4, BF16)
    return cost.weights_bytes + sequences * context * cost.kv_bytes_per_token


def decode_limit(shape: ModelShape, on: Device, context: int, sequences: int) -> Limit:
    """The longer of reading the step's bytes and doing its operations."""
    cost = CostModel.of(shape, on, Q4, BF16)
    reading = decode_bytes(shape, context, sequences) / on.bytes_per_s
    per_sequence = cost.ops_per_token + cost.ops_per_row + cost.ops_per_pair * context
    computing = sequences * per_sequence / on.ops_per_s
    return Limit(sequences / max(reading, computing), computing > reading)


def tokens_per_block(shape: ModelShape, page: int) -> int:
    """Tokens after which a sequence needs its next mapping."""
    (spec,) = shape.spec.kv_shape(KVFormat.BFLOAT16).specs
    return page // spec.row_bytes


def mapping_seconds(shape: ModelShape, on: Device, page: int, sequences: int) -> float:
    """Seconds of mapping per decode step: each sequence has one batch per block."""
    return sequences * on.mapping_batch_s / tokens_per_block(shape, page)


def gather_share(shape: ModelShape, on: Device) -> float:
    """Copying a chunk's past together (paged), as a share of attention's arithmetic over it.

    Per past token and layer: K and V are read and written once; each of the chunk's rows has two
    products with it in every query head. Both grow with the past alike.
    """
    its = shape.spec.attentions[0]
    row = its.kv_heads * its.head_dim * ELEMENT_BYTES
    copying = 2 * 2 * row / on.bytes_per_s
    attending = CHUNK * 4 * its.heads * its.head_dim / on.ops_per_s
    return copying / attending


# --- tables ---------------------------------------------------------------------------------------


def decode_table(models: dict[str, ModelShape]) -> str:
    """Bytes of a step and tokens per second."""
    rows: list[list[str]] = []
    for name, shape in models.items():
        for context in CONTEXTS:
            moved = three(f"{decode_bytes(shape, context, n) / 1e9:.2f}" for n in SEQUENCES)
            cells: list[str] = []
            for device_name in DEVICES:
                limits = [decode_limit(shape, device(device_name), context, n) for n in SEQUENCES]
                cells.append(
                    three(f"{lim.tokens_per_s:.0f}{'*' * lim.by_arithmetic}" for lim in limits)
                )
            rows.append([name, f"{context // KIB}k", moved, *cells])
    bandwidths = [f"{name}, {device(name).bytes_per_s / 1e9:g} GB/s" for name in DEVICES]
    return table(["Qwen3", "context", "GB per step", *bandwidths], rows)


def mapping_table(models: dict[str, ModelShape]) -> str:
    """What mapping would add to a step if the step waited for it."""
    rows: list[list[str]] = []
    for name, shape in models.items():
        for page in PAGES:
            tokens = tokens_per_block(shape, page)
            added = three(
                f"{mapping_seconds(shape, device('M1'), page, n) * 1e3:.3f}" for n in SEQUENCES
            )
            shares: list[str] = []
            for device_name in DEVICES:
                on = device(device_name)
                parts = [
                    mapping_seconds(shape, on, page, n)
                    * decode_limit(shape, on, 8 * KIB, n).tokens_per_s
                    / n
                    for n in SEQUENCES
                ]
                shares.append(three(f"{100 * part:.2f}" for part in parts))
            rows.append([name, f"{page // KIB} KiB", str(tokens), added, *shares])
    names = [f"{name}, %" for name in DEVICES]
    return table(["Qwen3", "page", "tokens per block", "ms per step", *names], rows)


def gather_table(models: dict[str, ModelShape]) -> str:
    """The paged substrate's gather beside attention itself."""
    rows = [
        [name, *(f"{100 * gather_share(shape, device(d)):.1f}" for d in DEVICES)]
        for name, shape in models.items()
    ]
    return table(["Qwen3", *(f"{name}, %" for name in DEVICES)], rows)


def sheet() -> list[str]:
    """The paragraphs of the section."""
    models = shapes()
    return [
        "**Decoding**, weights in 4 bits (MLX's groups of 64: 4.5 bits per number), K and V in "
        "bfloat16. Each cell is for 1 / 8 / 32 sequences of that many tokens: gigabytes (10^9) "
        "that a step reads, and the most tokens per second of all sequences together. `*`: "
        "arithmetic is the limit, not memory.",
        decode_table(models),
        "**Mapping**, at 0.15 ms a batch and one batch per sequence and block: milliseconds "
        "per step for 1 / 8 / 32 sequences, and their share of the shortest step at 8k tokens. "
        "Between steps all batches are waited for at once; where the stress test has passed, "
        "quire maps ahead on a thread of its own, so that a step pays this only where it would "
        "have to wait.",
        mapping_table(models),
        f"**Prefill on the paged substrate**, a chunk of {CHUNK} tokens: copying the past's K "
        "and V together costs this share of the attention over it, whatever the length of the "
        "past; twice the chunk, half the share. A chunk kernel of our own would save it, and "
        "would have to match the matrix units that `mx.fast.scaled_dot_product_attention` "
        "uses: the gather it is.",
        gather_table(models),
    ]


if __name__ == "__main__":
    sys.exit(SECTION.main(sheet(), sys.argv[1:]))
