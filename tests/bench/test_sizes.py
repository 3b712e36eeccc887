from dataclasses import fields

from tests.bench.rounds import Rounds
from tests.bench.sizes import FULL, QUICK


def test_quick_is_never_more_than_full() -> None:
    for field in fields(QUICK):
        quick, full = getattr(QUICK, field.name), getattr(FULL, field.name)
        if isinstance(quick, Rounds):
            assert quick.most <= full.most, field.name
            assert quick.limit_s <= full.limit_s, field.name
        else:
            assert quick <= full, field.name


def test_rounds_can_be_set_for_all_and_nothing_else_changes() -> None:
    size = QUICK.with_rounds(3)
    for field in fields(QUICK):
        before, after = getattr(QUICK, field.name), getattr(size, field.name)
        if isinstance(before, Rounds) and before.most > 0:
            assert after.most == 3, field.name
        else:
            assert after == before, field.name
