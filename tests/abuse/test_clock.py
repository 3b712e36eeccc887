"""The wall clock may jump: it is only told, and nothing is measured by it."""

import ast
import json
import time
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.server.harness import CHAT, Connection, chat, events, http_client

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in ("server", "engine", "kvcache", "metal_ext")
    for path in sorted((ROOT / package).rglob("*.py"))
]
WALL_CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
# Each says when an answer, a model or a report was made, a fault was met, a record was written or
# used (which later processes must know), how old a file is, until when a model stays or a
# certificate is valid, tells a template the day, or finds out that a machine has slept.
ALLOWED = {
    ("server/chat/served_model.py", "new_metadata"),
    ("server/protocol/responses/answer.py", "whole"),
    ("kvcache/backends/faults.py", "write_record"),
    ("engine/models/identity.py", "content_digest"),
    ("engine/power.py", "__init__"),
    ("kvcache/tier/store.py", "__init__"),
    ("server/cli/doctor.py", "run_first_hour"),
    ("server/cli/running.py", "_stays"),
    ("server/protocol/ollama/answer.py", "OllamaAnswer"),
    ("server/supervisor/front.py", "_state_of"),
    ("server/ray/certificates.py", "_sign"),
    ("server/text/template_sandbox.py", "_compiled"),
}


def wall_clocks(tree: ast.AST, place: str = "module") -> list[str]:
    """Names of the innermost functions or classes that ask one."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inner = place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = node.name
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in WALL_CLOCKS.get(node.value.id, ())
        ):
            found.append(place)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [place for name in node.names if name.name in WALL_CLOCKS["time"]]
        found += wall_clocks(node, inner)
    return found


def test_fault_23_the_wall_clock_is_asked_at_named_places_only() -> None:
    found = {
        (str(path.relative_to(ROOT)), place)
        for path in SOURCES
        for place in wall_clocks(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef f(): return time.time()",
        "from time import time\n",
        "from datetime import datetime\ndef f(): return datetime.now()",
    ],
)
def test_a_wall_clock_is_noticed(source: str) -> None:
    assert wall_clocks(ast.parse(source))


async def test_fault_23_a_clock_that_jumps_changes_no_answer_and_ends_nothing(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a month, at every look, to and fro."""
    asked: list[float] = []

    def jumping() -> float:
        asked.append(1e9 + (len(asked) % 2) * 2_600_000)
        return asked[-1]

    plain = Connection(app, CHAT, chat(max_tokens=30))
    await plain.end()
    monkeypatch.setattr(time, "time", jumping)
    stream = Connection(app, CHAT, chat(max_tokens=30, stream=True))
    whole = Connection(app, CHAT, chat(max_tokens=30))
    await stream.end()
    await whole.end()
    answer = json.loads(whole.body)
    assert answer["choices"] == json.loads(plain.body)["choices"]
    assert answer["created"] in {int(seconds) for seconds in asked}
    assert len({chunk["created"] for chunk in events(stream.body)}) == 1, "asked once"
    async with http_client(app) as http:
        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/health")).status_code == 200
