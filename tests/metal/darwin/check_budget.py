"""What a Mac's GPU can hold is served, however little macOS calls available at that moment."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.metal.darwin.macs import MACS, SHELL_LIMIT, Mac
from tests.metal.darwin.product import Product
from tests.metal.macs import GIB, MODELS, write_hollow_model
from tests.models import write_tokenizer

FEWEST_TOKENS = 4096
LARGEST = ("4B", "8B", "14B")
PLANNED = re.compile(r"K and V: (\d+) tokens")


def plan_of(product: Product, mac: Mac, figures: Path, model: Path) -> int:
    """Tokens of K and V that serve has planned; it is ended before it loads the weights."""
    command = product.command(mac.with_limit(SHELL_LIMIT), mac.told(figures), "quire")
    process = subprocess.Popen(
        [*command, "serve", model, "--port", "0", "--log-level", "debug"],
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
    product: Product, mac: Mac, name: str, figures: Path, tmp_path: Path
) -> None:
    model = tmp_path / name
    assert write_hollow_model(model, MODELS[name]) > 0.8 * mac.available_gib * GIB
    write_tokenizer(model, 1024)
    assert plan_of(product, mac, figures, model) >= FEWEST_TOKENS
