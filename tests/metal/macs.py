"""Which Macs serve which models: ``python -m tests.metal.macs [--hybrids | --against CHECKOUT]``.

Plans Qwen3 in MLX's 4 bits, with all settings at their defaults, for Macs in use: what starts, with
how many tokens of K and V, and what the GPU's working set would hold if others were left nothing.
--against: what another checkout would do with the same Macs, by its own code and its own Python.
--hybrids: the same of mixtures of experts and of hybrids; then the sum beside what other servers of
the same weights were measured to take.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.checkpoint import promised_tensors, tensors_of
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.planning.devices import Device
from kvcache.state_cache import CELLS_PER_SEQUENCE
from tests.metal.roofline import MODELS as SMALL_MODELS
from tests.metal.roofline import device
from tests.models import QWEN3_4B, ModelSpec, write_config
from tests.published import PUBLISHED

ROOT = Path(__file__).parents[2]
GIB = 1024**3
KIB = 1024
QUANTIZATION = {"group_size": 64, "bits": 4}
MEMORIES_GIB = (8, 16, 24, 32, 36, 48)
HYBRID_MEMORIES_GIB = (16, 24, 32, 36, 48, 64)
# Of a Mac with 24 GiB in use, as vm_stat had it (pull request 4876 of HMCL-dev/HMCL): free and
# inactive pages, which psutil calls available, are 0.30 of the memory; free, file-backed and
# purgeable ones, which Activity Monitor does not call used, are 0.20. One with 8 GiB had 0.26 by
# psutil's count (issue 1503 of giampaolo/psutil).
FREE_AND_INACTIVE = 0.30
NOT_USED = 0.20
# Huggingface's Qwen/Qwen3-14B and Qwen/Qwen3-32B.
MODELS: dict[str, ModelSpec] = SMALL_MODELS | {
    "14B": replace(
        QWEN3_4B,
        num_hidden_layers=40,
        hidden_size=5120,
        num_attention_heads=40,
        intermediate_size=17408,
        tie_word_embeddings=False,
    ),
    "32B": replace(
        QWEN3_4B,
        num_hidden_layers=64,
        hidden_size=5120,
        num_attention_heads=64,
        intermediate_size=25600,
        tie_word_embeddings=False,
    ),
}
HYBRID_HEAD = (
    "memory",
    "working set",
    "model",
    "weights",
    "tokens of K and V",
    "cells of states",
    "sequences",
    "context",
)
MEASURED_HEAD = ("model", "what", "measured", "by our sum", "difference", "source")
HYBRID_NOTE = (
    "*: a tight fit. No Mac was measured with quire. A process has its interpreter and libraries "
    "beside its weights, 0.7 to 0.9 GiB here, which no GPU's working set holds; and the other "
    "server's peak is that of its own operations and caches."
)
# Prompt and answer of what was measured.
MEASURED_TOKENS = 8112 + 96
HEAD = ("memory", "working set", "Qwen3", "weights", "working set holds", "starts with", "context")


@dataclass(frozen=True, slots=True)
class Mac:
    """Bytes of a Mac's memory, and of its GPU's working set."""

    memory_bytes: int
    working_set_bytes: int


def macs(memories_gib: Sequence[int]) -> list[Mac]:
    """With what macOS recommends for so much memory; engine/planning/devices.py has the sources."""
    chip: Device = device("M1")
    sizes = [gib * GIB for gib in memories_gib]
    return [Mac(size, chip.working_set_bytes(size)) for size in sizes]


def cases(folder: Path, available_ratio: float) -> list[dict[str, Any]]:
    """Every Mac with every model, as ``mac_plans`` wants them. folder: for the models."""
    weights = {name: write_hollow_model(folder / name, spec) for name, spec in MODELS.items()}
    return _crossed(folder, weights, MEMORIES_GIB, available_ratio)


def hybrid_cases(folder: Path) -> list[dict[str, Any]]:
    """The same of mixtures and hybrids."""
    weights = {
        name: write_hollow_model(folder / name, its.spec, **its.fields)
        for name, its in PUBLISHED.items()
    }
    return _crossed(folder, weights, HYBRID_MEMORIES_GIB, NOT_USED)


def _crossed(
    folder: Path, weights: dict[str, int], memories_gib: Sequence[int], available_ratio: float
) -> list[dict[str, Any]]:
    """weights: bytes, by the model's name."""
    return [
        {
            "model": name,
            "folder": str(folder / name),
            "weights_bytes": size,
            "memory_bytes": mac.memory_bytes,
            "working_set_bytes": mac.working_set_bytes,
            "available_bytes": int(available_ratio * mac.memory_bytes),
        }
        for mac in macs(memories_gib)
        for name, size in weights.items()
    ]


def write_hollow_model(folder: Path, spec: ModelSpec, **fields: Any) -> int:
    """A checkpoint whose file has a header and the right size, and takes no place on the disk.
    Returns the bytes of its weights. fields: of config.json."""
    config = ModelConfig(write_config(folder, spec, quantization=QUANTIZATION, **fields))
    model = tensors_of(read_spec(config), embeds=False)
    header, end = {}, 0
    for name, tensor in promised_tensors(config, model).items():
        start, end = end, end + tensor.stored_bytes
        shape = list(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    return end


def plans_of(checkout: Path, wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a checkout plans. Raises RuntimeError where its code could not be run."""
    python = Path(sys.executable) if checkout == ROOT else checkout / ".venv/bin/python"
    done = subprocess.run(
        [python, Path(__file__).with_name("mac_plans.py")],
        input=json.dumps(wanted),
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} plans nothing:\n{done.stderr}")
    found = json.loads(done.stdout)
    if not Path(found["engine"]).is_relative_to(checkout):
        raise RuntimeError(f"not {checkout} was run, but {found['engine']}")
    plans: list[dict[str, Any]] = found["plans"]
    return plans


def table(against: Path | None) -> list[str]:
    """Markdown. A * is a plan with a warning: other programs hold some of its memory now."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = cases(folder, NOT_USED)
        plans = plans_of(ROOT, wanted)
        room = {"memory_bytes": 1 << 50, "working_set_bytes": 1 << 50}
        roomy = plans_of(ROOT, [case | room for case in wanted])
        others = None if against is None else plans_of(against, cases(folder, FREE_AND_INACTIVE))
    head = HEAD if others is None else (*HEAD, f"{against}")
    lines = [_row(head), _row(["---"] * len(head))]
    for number, (case, plan) in enumerate(zip(wanted, plans, strict=True)):
        cells = [
            f"{case['memory_bytes'] // GIB} GiB",
            f"{case['working_set_bytes'] / GIB:.2f} GiB",
            case["model"],
            f"{case['weights_bytes'] / GIB:.2f} GiB",
            str(working_set_holds(case, roomy[number])),
            told(plan),
            str(plan.get("context", "")),
        ]
        lines.append(_row(cells if others is None else [*cells, told(others[number])]))
    return lines


def hybrid_tables() -> list[str]:
    """Markdown: every Mac with every mixture and hybrid, and the sum beside what was measured."""
    with tempfile.TemporaryDirectory() as name:
        wanted = hybrid_cases(Path(name))
        plans = plans_of(ROOT, wanted)
    lines = [_row(HYBRID_HEAD), _row(["---"] * len(HYBRID_HEAD))]
    for case, plan in zip(wanted, plans, strict=True):
        started = "refused" not in plan
        lines.append(
            _row(
                [
                    f"{case['memory_bytes'] // GIB} GiB",
                    f"{case['working_set_bytes'] / GIB:.2f} GiB",
                    case["model"],
                    f"{case['weights_bytes'] / GIB:.2f} GiB",
                    told(plan),
                    f"{plan['cells']}, {plan['state_bytes'] / GIB:.2f} GiB" if started else "",
                    str(plan.get("sequences", "")),
                    str(plan.get("context", "")),
                ]
            )
        )
    lines += ["", _row(MEASURED_HEAD), _row(["---"] * len(MEASURED_HEAD))]
    for its in MEASURED:
        ours = its.of(wanted, plans)
        lines.append(
            _row(
                [
                    its.model,
                    its.what,
                    f"{its.amount:g}",
                    f"{ours:.2f}",
                    f"{100 * (ours / its.amount - 1):+.1f} %",
                    its.source,
                ]
            )
        )
    return lines


@dataclass(frozen=True, slots=True)
class Measured:
    """What another server was measured to take, or says that it does."""

    model: str
    what: str
    amount: float
    """In the unit that it names."""
    source: str
    of: Callable[[list[dict[str, Any]], list[dict[str, Any]]], float]
    """The same by the planner's sum, of cases and plans."""


def _of_weights(model: str, unit: float = GIB) -> Callable[..., float]:
    def found(wanted: list[dict[str, Any]], _: object) -> float:
        case = next(case for case in wanted if case["model"] == model)
        return float(case["weights_bytes"] / unit)

    return found


def _of_all(model: str) -> Callable[..., float]:
    """Weights, activations, caches, K and V of 8k tokens, and one sequence's states; GiB."""

    def found(wanted: list[dict[str, Any]], plans: list[dict[str, Any]]) -> float:
        plan = next(
            plan
            for case, plan in zip(wanted, plans, strict=True)
            if case["model"] == model and "refused" not in plan
        )
        cells = plan["state_bytes"] * CELLS_PER_SEQUENCE // plan["cells"]
        kept = MEASURED_TOKENS * plan["bytes_per_token"] + cells
        return float((plan["fixed_bytes"] + kept) / GIB)

    return found


def _smallest_mac(model: str) -> Callable[..., float]:
    """GiB of the smallest Mac that holds 8k tokens."""

    def found(wanted: list[dict[str, Any]], plans: list[dict[str, Any]]) -> float:
        return float(
            min(
                case["memory_bytes"] // GIB
                for case, plan in zip(wanted, plans, strict=True)
                if case["model"] == model and plan.get("context", 0) >= MEASURED_TOKENS
            )
        )

    return found


def _context(model: str, memory_gib: int) -> Callable[..., float]:
    """Thousands of tokens of the longest sequence."""

    def found(wanted: list[dict[str, Any]], plans: list[dict[str, Any]]) -> float:
        wanted_memory = memory_gib * GIB
        (plan,) = (
            plan
            for case, plan in zip(wanted, plans, strict=True)
            if (case["model"], case["memory_bytes"]) == (model, wanted_memory)
        )
        return float(plan.get("context", 0) / KIB)

    return found


def _footprints(model: str, idle: float, peak: float) -> list[Measured]:
    return [
        Measured(model, "the process when it is idle, GiB", idle, FOOTPRINTS, _of_weights(model)),
        Measured(model, "its peak at 8k tokens, GiB", peak, FOOTPRINTS, _of_all(model)),
    ]


# Of Rapid-MLX, by macOS' footprint (which counts in powers of two and writes two or three digits),
# and by MLX's own counter.
FOOTPRINTS = "raullenchai/Rapid-MLX, docs/benchmarks/model-recommendation-measurements.json"
SPLASH = "Splash, as published"
MEASURED = (
    *_footprints("Qwen3.5-4B", 2.911, 5.977),
    *_footprints("Qwen3.5-9B", 5.403, 8.718),
    *_footprints("Qwen3.6-27B", 15.0, 21.0),
    Measured(
        "Qwen3.6-27B",
        "its peak at 8k tokens, GiB (Qwen3.8-27B, as large)",
        20.0,
        FOOTPRINTS,
        _of_all("Qwen3.6-27B"),
    ),
    Measured(
        "Qwen3.6-27B",
        "MLX's active memory when it is idle, GB (Qwen3.8-27B, as large)",
        15.13,
        FOOTPRINTS,
        _of_weights("Qwen3.6-27B", 1e9),
    ),
    # The peak is of Qwen3.5-35B-A3B, which is as large: of 3.6 it was not measured.
    *_footprints("Qwen3.6-35B-A3B", 19.0, 22.0),
    Measured(
        "Qwen3.6-35B-A3B",
        "the smallest Mac, for 8k tokens, GiB",
        36,
        SPLASH,
        _smallest_mac("Qwen3.6-35B-A3B"),
    ),
    Measured(
        "Qwen3.6-35B-A3B",
        "context on a Mac with 48 GiB, thousands of tokens",
        256,
        SPLASH,
        _context("Qwen3.6-35B-A3B", 48),
    ),
)


def working_set_holds(case: dict[str, Any], plan: dict[str, Any]) -> int:
    """Tokens of K and V beside all else in the whole working set. plan: with any room."""
    left = case["working_set_bytes"] - plan["fixed_bytes"]
    return max(0, int(left // plan["bytes_per_token"]))


def told(plan: dict[str, Any]) -> str:
    """Tokens of K and V, or that it is refused."""
    if "refused" in plan:
        return "refused"
    return f"{plan['tokens']}{' *' if plan['warning'] else ''}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.metal.macs", description=__doc__)
    parser.add_argument("--against", type=Path, help="a checkout, built")
    parser.add_argument("--hybrids", action="store_true", help="mixtures of experts and hybrids")
    asked = parser.parse_args(arguments)
    if asked.hybrids:
        print(*hybrid_tables(), HYBRID_NOTE, sep="\n")
        return 0
    print(*table(asked.against and asked.against.resolve()), sep="\n")
    print(
        f"*: a tight fit: what it takes from the start is more than is available now, which is "
        f"{NOT_USED:.0%} of the memory as Activity Monitor counts it; another checkout is told "
        f"{FREE_AND_INACTIVE:.0%}, as psutil counts it."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
