"""``python -m tests.structured [--answers N]``: prints what became of every part."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.structured.proof import AT_A_TIME, Outcome, call_questions, form_questions, prove
from tests.structured.schemas import SCHEMAS, TOOLS

MOST_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when an answer was not what it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=__doc__)
    parser.add_argument("--answers", type=int, default=500, help="of each part")
    answers = parser.parse_args(arguments).answers
    print(f"{len(SCHEMAS)} schemas, {len(TOOLS)} tools, {AT_A_TIME} requests at a time")
    with tempfile.TemporaryDirectory(prefix="quire-structured-") as name:
        outcomes = asyncio.run(_run(Path(name), answers))
    for outcome in outcomes:
        for problem in outcome.problems[:MOST_SHOWN]:
            print(f"{outcome.name}: {problem}")
    return int(any(outcome.valid < outcome.asked for outcome in outcomes))


async def _run(folder: Path, answers: int) -> list[Outcome]:
    parts = (
        ("json_schema", "hermes", form_questions(answers)),
        ("calls, hermes", "hermes", call_questions(answers)),
        ("calls, XML", "xml", call_questions(answers)),
    )
    outcomes = []
    for number, (name, tool_format, questions) in enumerate(parts):
        started_s = time.monotonic()
        outcomes.append(await prove(name, folder / str(number), tool_format, questions))
        print(f"{outcomes[-1]}, {time.monotonic() - started_s:.0f} s", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
