"""What a Mac's GPU can hold is served, however little macOS calls available at that moment."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.metal.darwin.hollow import MODELS, write_hollow_model
from tests.metal.darwin.macs import MACS, SHELL_LIMIT, Mac
from tests.metal.darwin.product import Product

FEWEST_TOKENS = 4096
PLANNED = re.compile(r"K and V: (\d+) tokens")


def plan_of(product: Product, mac: Mac, figures: Path, model: Path) -> int:
    """Tokens of K and V that serve has planned; it is ended before it loads the weights."""
    command = product.command(mac.with_limit(SHELL_LIMIT), mac.told(figures), "quire")
    process = subprocess.Popen(
        [*command, "serve", model, "--port", "0"], stderr=subprocess.PIPE, text=True
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


@pytest.mark.parametrize(("mac", "name"), [*zip(MACS, MODELS, strict=True)], ids=str)
def test_a_model_that_fits_the_working_set_is_served(
    product: Product, mac: Mac, name: str, figures: Path, tmp_path: Path
) -> None:
    model = write_hollow_model(tmp_path / name, MODELS[name])
    weights = (model / "model.safetensors").stat().st_size
    assert mac.available_gib * 2**30 < 2 * weights
    assert plan_of(product, mac, figures, model) >= FEWEST_TOKENS
