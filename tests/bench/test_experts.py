"""The figures of experts are there for every instruction set."""

from typing import Any
from unittest import mock

import metal_ext
from tests.bench import experts
from tests.bench.rounds import Rounds


def test_every_instruction_set_has_its_share_of_the_memorys_speed() -> None:
    small: dict[str, Any] = {
        "HIDDEN": 128,
        "INNER": 64,
        "EXPERTS": 9,
        "CHOSEN": 2,
        "PROBE_BYTES": 1 << 22,
    }
    with mock.patch.multiple(experts, **small):
        found = experts.run_experts(Rounds(1, 1.0), 2)
    assert [row.name for row in found.rows] == [
        f"experts, one row, {form}, {name}"
        for form in experts.FORMS
        for name in metal_ext.instruction_sets()
        for _ in range(2)
    ]
