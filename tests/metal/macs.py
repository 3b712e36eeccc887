"""Which Macs serve which models: ``python -m tests.metal.macs [--against CHECKOUT]``.

Plans Qwen3 in MLX's 4 bits, with all settings at their defaults, for Macs in use: what starts, with
how many tokens of K and V, and what the GPU's working set would hold if others were left nothing.
--against: what another checkout would do with the same Macs, by its own code and its own Python.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.checkpoint import tensors_of
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.promised_checkpoint import promised_tensors
from engine.planning.devices import Device
from tests.metal.roofline import MODELS as SMALL_MODELS
from tests.metal.roofline import device
from tests.models import QWEN3_4B, ModelSpec, write_config

ROOT = Path(__file__).parents[2]
GIB = 1024**3
QUANTIZATION = {"group_size": 64, "bits": 4}
MEMORIES_GIB = (8, 16, 24, 32, 36, 48)
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
HEAD = ("memory", "working set", "Qwen3", "weights", "working set holds", "starts with", "context")


@dataclass(frozen=True, slots=True)
class Mac:
    """Bytes of a Mac's memory, and of its GPU's working set."""

    memory_bytes: int
    working_set_bytes: int


def macs() -> list[Mac]:
    """With what macOS recommends for so much memory; engine/planning/devices.py has the sources."""
    chip: Device = device("M1")
    sizes = [gib * GIB for gib in MEMORIES_GIB]
    return [Mac(size, chip.working_set_bytes(size)) for size in sizes]


def cases(folder: Path, available_ratio: float) -> list[dict[str, Any]]:
    """Every Mac with every model, as ``mac_plans`` wants them. folder: for the models."""
    weights = {name: write_hollow_model(folder / name, spec) for name, spec in MODELS.items()}
    return [
        {
            "model": name,
            "folder": str(folder / name),
            "weights_bytes": size,
            "memory_bytes": mac.memory_bytes,
            "working_set_bytes": mac.working_set_bytes,
            "available_bytes": int(available_ratio * mac.memory_bytes),
        }
        for mac in macs()
        for name, size in weights.items()
    ]


def write_hollow_model(folder: Path, spec: ModelSpec) -> int:
    """A checkpoint whose file has a header and the right size, and takes no place on the disk.
    Returns the bytes of its weights."""
    config = ModelConfig(write_config(folder, spec, quantization=QUANTIZATION))
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
    asked = parser.parse_args(arguments)
    print(*table(asked.against and asked.against.resolve()), sep="\n")
    print(
        f"*: a tight fit: what it takes from the start is more than is available now, which is "
        f"{NOT_USED:.0%} of the memory as Activity Monitor counts it; another checkout is told "
        f"{FREE_AND_INACTIVE:.0%}, as psutil counts it."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
