import pytest

from tests.metal.core.faults import FAULTS, SOURCES, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_mistake_replaces_stands_in_its_source_once(fault: Fault) -> None:
    assert (SOURCES / fault.file).read_text().count(fault.text) == 1
    assert fault.text != fault.becomes
