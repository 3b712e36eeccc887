"""What a Mac's GPU can hold is served, however little macOS calls available at that moment."""

import json
import re
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.checkpoint import promised_tensors, tensors_of
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from tests.metal.darwin.macs import GIB, MACS, SHELL_LIMIT, Mac
from tests.metal.darwin.product import command
from tests.models import QWEN3_4B, QWEN3_8B, ModelSpec, write_config, write_tokenizer

FEWEST_TOKENS = 4096
# The largest that each Mac's GPU holds, in 4 bits.
LARGEST = {
    "4B": QWEN3_4B,
    "8B": QWEN3_8B,
    "14B": replace(
        QWEN3_8B,
        num_hidden_layers=40,
        hidden_size=5120,
        num_attention_heads=40,
        intermediate_size=17408,
    ),
}
QUANTIZATION = {"group_size": 64, "bits": 4}
PLANNED = re.compile(r"K and V: (\d+) tokens")


def write_hollow_model(folder: Path, spec: ModelSpec) -> int:
    """A model whose file of weights has a header and the right size, and takes no place on the
    disk. Returns the bytes of its weights."""
    config = ModelConfig(write_config(folder, spec, quantization=QUANTIZATION))
    header, end = {}, 0
    for name, tensor in promised_tensors(
        config, tensors_of(read_spec(config), embeds=False)
    ).items():
        start, end = end, end + tensor.stored_bytes
        shape = list(tensor.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    write_tokenizer(folder, 1024)
    return end


def plan_of(mac: Mac, figures: Path, model: Path) -> int:
    """Tokens of K and V that serve has planned; it is ended before it loads the weights."""
    quire = command(mac.with_limit(SHELL_LIMIT), mac.told(figures), "quire")
    process = subprocess.Popen(
        [*quire, "serve", model, "--port", "0", "--log-level", "debug"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = ""
    try:
        for line in process.stderr:
            if found := PLANNED.search(line):
                return int(found[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    raise AssertionError(line)


@pytest.mark.parametrize(("mac", "name"), [*zip(MACS, LARGEST, strict=True)], ids=str)
def test_a_model_that_fits_the_working_set_is_served(
    mac: Mac, name: str, figures: Path, tmp_path: Path
) -> None:
    model = tmp_path / name
    assert write_hollow_model(model, LARGEST[name]) > 0.8 * mac.available_gib * GIB
    assert plan_of(mac, figures, model) >= FEWEST_TOKENS
