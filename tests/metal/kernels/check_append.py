"""append and gather: rows are where they belong, rounded once, and nothing else is touched."""

from itertools import product

import numpy as np
import pytest

from tests.metal.kernels.device import Device, struct
from tests.metal.kernels.formats import FORMATS, Format, Stored
from tests.metal.kernels.store import KINDS, KVStore

NAMES = list(FORMATS)
SMALL = ("bfloat", "half", "sparse"), ("float", "bfloat", "dense"), ("bfloat", "bfloat", "paged")
COVER = [c for c in product(NAMES, NAMES, KINDS) if c not in SMALL]
CASES = [*(pytest.param(*case, marks=pytest.mark.small) for case in SMALL), *COVER]
HEADS, DIM = 2, 64
BEFORE = 3  # rows of the table that the arrays do not have


def append(
    device: Device,
    name: str,
    store: KVStore,
    keys: Stored,
    values: Stored,
    rows: list[tuple[int, int]],
) -> None:
    """Runs the kernel over a grid that is not made of whole threadgroups."""
    arguments = struct("AppendArguments", *store.place, store.row_elements, len(rows))
    device.threads(
        f"append_{name}_{store.number.name}_{store.kind}",
        [keys, values, store.entries(rows), store.pages, store.arena, arguments],
        (store.row_elements // 4, len(rows)),
        (24, 2),
    )


def random_rows(number: Format, rows: int, seed: int) -> Stored:
    """[rows][kv_heads][head_dim]."""
    return number.encode(np.random.default_rng(seed).normal(size=(rows, HEADS, DIM)) * 3)


@pytest.mark.parametrize(("name", "kv", "kind"), CASES)
def test_appended_rows_are_at_their_places_and_nothing_else_changes(
    device: Device, name: str, kv: str, kind: str
) -> None:
    number = FORMATS[name]
    store = KVStore(kind, [70, 3], HEADS, DIM, FORMATS[kv])
    block = store.tokens_per_block
    rows = [(0, 0), (0, block - 1), (0, block), (1, 2), (0, 69)]
    keys, values = random_rows(number, len(rows), 1), random_rows(number, len(rows), 2)
    wanted = KVStore(kind, [70, 3], HEADS, DIM, FORMATS[kv])
    for which, new in enumerate((keys, values)):
        for sequence in range(2):
            kept = wanted.rows(sequence, which)
            for row, (where, position) in enumerate(rows):
                if where == sequence:
                    kept[position] = store.number.encode(number.decode(new[row]))
            wanted.write_stored(sequence, which, kept)
    append(device, name, store, keys, values, rows)
    assert store.everything() == wanted.everything()


@pytest.mark.small
def test_appending_reads_arrays_that_begin_at_any_four_numbers_and_not_behind_their_end(
    device: Device,
) -> None:
    number = FORMATS["bfloat"]
    store = KVStore("sparse", [5], HEADS, DIM, number)
    both = random_rows(number, 3, 1).reshape(-1)
    keys, values = (part.reshape(1, HEADS, DIM) for part in (both[4:132], both[132:260]))
    append(device, "bfloat", store, keys, values, [(0, 4)])
    assert np.array_equal(store.rows(0, 0)[4], keys[0])
    assert np.array_equal(store.rows(0, 1)[4], values[0])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.small) for kind in KINDS])
@pytest.mark.parametrize("kv", NAMES)
@pytest.mark.parametrize(("first", "tokens"), [(0, n) for n in (1, 15, 16, 17, 50)] + [(23, 30)])
def test_gathered_rows_are_those_of_the_sequence_in_order(
    device: Device, kind: str, kv: str, first: int, tokens: int
) -> None:
    number, end = FORMATS[kv], first + tokens
    store = KVStore(kind, [20, end], HEADS, DIM, number)
    for which in (0, 1):
        store.write_stored(1, which, random_rows(number, len(store.rows(1, which)), which))
    keys, values = (number.nans(tokens + 1, HEADS, DIM) for _ in range(2))
    arguments = struct("GatherArguments", *store.place, store.row_elements, tokens, BEFORE, first)
    table = store.entries([(0, 0)] * BEFORE + [(1, end - 1)])
    device.threads(
        f"gather_{kv}_{kind}",
        [table, store.pages, store.arena, keys, values, arguments],
        (store.row_elements // 4, tokens),
        (32, 4),
    )
    for which, found in enumerate((keys, values)):
        assert np.array_equal(found[:tokens], store.rows(1, which)[first:end])
        assert np.isnan(number.decode(found[tokens])).all(), "one row too many"


@pytest.mark.small
def test_a_grid_of_whole_threadgroups_goes_no_further(device: Device) -> None:
    number = FORMATS["bfloat"]
    store = KVStore("sparse", [4], HEADS, DIM, number)
    keys, values = random_rows(number, 4, 1), random_rows(number, 4, 2)
    table = store.entries([(0, position) for position in range(4)])
    arguments = struct("AppendArguments", *store.place, store.row_elements, 3)
    device.threadgroups(
        "append_bfloat_bfloat_sparse",
        [keys, values, table, store.pages, store.arena, arguments],
        (2, 2),
        (24, 2),
    )
    for which, new in enumerate((keys, values)):
        assert np.array_equal(store.rows(0, which)[:3], new[:3])
        assert np.isnan(number.decode(store.rows(0, which)[3:])).all()
