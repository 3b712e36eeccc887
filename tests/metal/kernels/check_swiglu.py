"""swiglu: silu(gate) * up against float64, rounded once, and nothing behind the last element."""

import numpy as np
import pytest

from tests.metal.kernels.device import SWIGLU_NUMBERS, Device, struct
from tests.metal.kernels.formats import FORMATS, Stored
from tests.metal.kernels.memory import exact_copy
from tests.metal.kernels.reference import gated

# Half a unit in the last place, of the result; and float32's arithmetic before it.
ROUNDING = {"float": 4e-7, "half": 2.0**-11 + 4e-7, "bfloat": 2.0**-8 + 4e-7}
SMALLEST = {"float": 1e-37, "half": 2.0**-24, "bfloat": 1e-37}
ELEMENTS = (1, 3, SWIGLU_NUMBERS, 1000, 1021)


def run(device: Device, name: str, gate: Stored, up: Stored, kind: int = 0) -> Stored:
    """Runs the kernel over a grid that is not made of whole threadgroups."""
    out, arguments = FORMATS[name].nans(gate.size + 9), struct("SwigluArguments", gate.size, kind)
    # Begins at a multiple of four elements, as on the host.
    read = [exact_copy(np.pad(array, (0, -array.size % SWIGLU_NUMBERS))) for array in (gate, up)]
    threads = -(-gate.size // SWIGLU_NUMBERS)
    buffers = [address for address, _ in read]
    device.threads(f"swiglu_{name}", [*buffers, out, arguments], (threads,), (min(threads, 96),))
    assert np.isnan(FORMATS[name].decode(out)[gate.size :]).all(), (
        "more than the results is written"
    )
    return out[: gate.size]


@pytest.mark.small
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_it_is_rounded_once(device: Device, name: str, elements: int, kind: int) -> None:
    number, random = FORMATS[name], np.random.default_rng(elements)
    gate, up = (number.encode(random.normal(size=elements) * 4) for _ in range(2))
    wanted = gated(number.decode(gate), number.decode(up), kind)
    found = number.decode(run(device, name, gate, up, kind))
    # Other gates round what the exponential is taken of, which may be far from 0.
    rounding = ROUNDING[name] + (2e-5 if kind else 0.0)
    assert (np.abs(found - wanted) <= rounding * np.abs(wanted) + SMALLEST[name]).all()


@pytest.mark.small
@pytest.mark.parametrize("name", FORMATS)
def test_a_gate_may_be_shut_or_wide_open(device: Device, name: str) -> None:
    number = FORMATS[name]
    gate = number.encode(np.array([-60000.0, -90.0, -0.0, 0.0, 90.0, 60000.0]))
    found = number.decode(run(device, name, gate, number.encode(np.full(6, 0.5))))
    assert np.abs(found[:4]).max() <= SMALLEST[name]
    assert np.array_equal(found[4:], number.decode(gate)[4:] / 2)
