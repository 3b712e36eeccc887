"""The threats and the faults that quire is built against, and the tests that hold each.

A test belongs to row 5 of the threats when its name begins ``test_threat_05_``, to row 7 of the
faults when it begins ``test_fault_07_``.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PYTHON_TEST = re.compile(r"^ *(?:async )?def (test_(threat|fault)_(\d\d)_\w+)\(", re.MULTILINE)
NATIVE_TEST = re.compile(r"\b((threat|fault)_(\d\d)_\w+)")

THREATS = {
    1: "listening to the world",
    2: "DNS rebinding",
    3: "a web page asks",
    4: "a way around the key",
    5: "slow headers, slow bodies, idle sockets",
    6: "a huge head",
    7: "a huge body",
    8: "hostile JSON",
    9: "a prompt too large",
    10: "the tokenizer stalls the loop",
    11: "too many requests",
    12: "a slow reader",
    13: "a client leaves",
    14: "endless generation",
    15: "timing tells what others asked",
    16: "old K and V in recycled pages",
    17: "logs and metrics that tell contents",
    18: "theft or poison of a cache on disk",
    19: "code that comes with a model, or from the network",
    20: "memory errors in native code",
    21: "a whole machine out of memory",
    22: "smuggled requests and forwarded headers",
}
FAULTS = {
    1: "a prompt that can never fit",
    2: "no pages at decode",
    3: "no pages at admission",
    4: "a reservation fails half-way",
    5: "a client disconnects, in any phase",
    6: "an abort races with an end",
    7: "logits that are not finite",
    8: "MLX raises in a step",
    9: "a Metal command buffer fails",
    10: "the device hangs",
    11: "the engine's thread dies",
    12: "an assertion fails",
    13: "the tokenizer fails",
    14: "a character cut between tokens",
    15: "a stop string across tokens",
    16: "damaged weights or settings of a model",
    17: "no space on disk",
    18: "a crash while a prefix is written to disk",
    19: "a cache on disk of another format or model",
    20: "a thread of the disk's reads arrays of MLX",
    21: "SIGTERM under load",
    22: "SIGKILL, power",
    23: "the wall clock jumps",
    24: "1000 connections",
    25: "the system runs out of memory",
    26: "a request id twice, a flood of messages",
    27: "/metrics under load",
}
NO_DISK = "quire keeps no prefixes on disk"
DO_NOT_APPLY = {
    ("threat", 18): NO_DISK,
    ("fault", 18): NO_DISK,
    ("fault", 19): NO_DISK,
    ("fault", 20): NO_DISK,
}
Row = tuple[str, int]


def tests_by_row() -> Mapping[Row, list[str]]:
    """(kind, number of the row) -> the names of its tests, with the files that have them."""
    found = defaultdict[Row, list[str]](list)
    for kind, number, name in sorted(_named_tests()):
        found[kind, number].append(name)
    return found


def _named_tests() -> Iterator[tuple[str, int, str]]:
    for pattern, glob in ((PYTHON_TEST, "test_*.py"), (NATIVE_TEST, "*_test.cpp")):
        for file in TESTS.rglob(glob):
            place = file.relative_to(TESTS.parent).as_posix()
            for name, kind, number in pattern.findall(file.read_text(encoding="utf-8")):
                yield kind, int(number), f"{place}: {name}"


def missing() -> list[Row]:
    """Rows that no test holds, though they apply."""
    found = tests_by_row()
    return [row for row in _rows() if row not in found and row not in DO_NOT_APPLY]


def unknown() -> list[Row]:
    """Rows that tests name and no table has."""
    return [row for row in tests_by_row() if row not in set(_rows())]


def described() -> Iterator[str]:
    """All rows with their tests, as lines."""
    found = tests_by_row()
    for kind, number in _rows():
        table = THREATS if kind == "threat" else FAULTS
        yield f"{kind} {number:2}: {table[number]}"
        yield from (f"    {name}" for name in found.get((kind, number), ()))
        if (kind, number) in DO_NOT_APPLY:
            yield f"    does not apply: {DO_NOT_APPLY[kind, number]}"


def _rows() -> list[Row]:
    rows = [("threat", number) for number in THREATS]
    return rows + [("fault", number) for number in FAULTS]
