"""A Mac's make reads the Makefile, whatever checkout it is of."""

from tests.metal.darwin.product import Product
from tests.test_makefile import faults


def test_the_makefile_is_for_a_macs_make_and_tools(product: Product) -> None:
    found = faults((product.folder / "Makefile").read_text())
    assert not found, found[0]
