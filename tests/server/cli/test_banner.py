"""What is said when a server listens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.build import EnginePlan
from engine.models.checkpoint import read_checkpoint
from server.cli import banner as module
from server.cli.banner import announce, announce_several
from server.cli.model_files import make_plan
from server.cli.settings import read_settings
from server.config import Config, Tables
from tests.server.commands import SMALL

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> EnginePlan:
    return make_plan(read_settings(None, SMALL), read_checkpoint(tiny_model))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What is logged."""
    found: list[dict[str, object]] = []

    def info(event: str, **fields: object) -> None:
        found.append({"event": event} | fields)

    monkeypatch.setattr(module, "log", SimpleNamespace(info=info))
    return found


def text_of(settings: Config, plan: EnginePlan, entries: list[dict[str, object]], url: str) -> str:
    announce(settings, plan, "demo", url)
    return str(entries[-1]["banner"])


def settings(**tables: dict[str, object]) -> Config:
    return Config.model_validate(tables)


def test_people_read_where_it_is_what_it_is_and_what_to_paste(
    plan: EnginePlan, entries: list[dict[str, object]]
) -> None:
    noted = replace(plan, memory=replace(plan.memory, note="addresses are short"))
    text = text_of(settings(), noted, entries, URL)
    head, empty, *lines = text.splitlines()
    assert head.endswith(f": serving demo on {URL}")
    assert empty == ""
    said = [tuple(line.split(maxsplit=1)) for line in lines]
    assert said[0] == ("page", f"{URL}/  (open it in a browser)")
    assert said[1] == ("clients", f"OPENAI_BASE_URL={URL}/v1")
    assert lines[2].strip() == f"ANTHROPIC_BASE_URL={URL}"
    assert lines[3] == "  API key    any (local only)"
    assert said[4] == ("model", "demo: context 256 tokens, 2 requests at a time")
    assert said[5][1].startswith("K and V up to 8.00 MiB (")
    assert lines[6] == "             addresses are short"
    assert said[7][1].startswith("KV backend: posix; kernels: ")
    assert said[8] == ("drafts", "of text")
    assert len(lines) == 10


def test_a_server_without_a_page_or_answers_does_not_name_them(
    plan: EnginePlan, entries: list[dict[str, object]]
) -> None:
    embeds = replace(plan, checkpoint=replace(plan.checkpoint, embeds=True))
    text = text_of(settings(server={"page": False}), embeds, entries, URL)
    assert "browser" not in text
    assert "ANTHROPIC" not in text
    assert "OPENAI_BASE_URL" in text


@pytest.mark.parametrize(
    ("url", "client"),
    [
        (URL, URL),
        ("http://0.0.0.0:8000", "http://localhost:8000"),
        ("http://[::]:9000", "http://localhost:9000"),
        ("http://[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_clients_are_told_an_address_that_they_can_reach(
    url: str, client: str, plan: EnginePlan, entries: list[dict[str, object]]
) -> None:
    assert f"OPENAI_BASE_URL={client}/v1\n" in text_of(settings(), plan, entries, url)


@pytest.mark.parametrize(
    ("tables", "rule"),
    [
        ({"access": {"api_keys": ["secret-of-sixteen-characters"]}}, "one of access.api_keys"),
        ({"server": {"host": "0.0.0.0"}}, "any (everybody who reaches "),
    ],
)
def test_the_key_rule_is_told_and_no_key(
    tables: Tables, rule: str, plan: EnginePlan, entries: list[dict[str, object]]
) -> None:
    text = text_of(settings(**tables), plan, entries, URL)
    assert f"API key    {rule}" in text
    assert "secret" not in text


def test_machines_read_the_sum_of_the_memory_as_numbers(
    plan: EnginePlan, entries: list[dict[str, object]]
) -> None:
    announce(settings(log={"format": "json"}), plan, "demo", URL)
    (entry,) = entries
    assert entry["event"] == f"serving demo on {URL}"
    assert (entry["model"], entry["url"], entry["max_model_len"]) == ("demo", URL, 256)
    assert entry["kv_budget_bytes"] == 8 * 1024**2
    assert isinstance(entry["machine_bytes"], int)
    assert entry["headroom_bytes"] == plan.memory.demand.headroom_bytes
    assert "banner" not in entry


def test_people_read_which_of_several_models_there_are(entries: list[dict[str, object]]) -> None:
    names = [f"model-{number}" for number in range(10)]
    announce_several(settings(), names, 3 << 30, URL)
    (entry,) = entries
    assert entry["event"] == f"serving 10 models on {URL}"
    text = str(entry["banner"])
    said = [tuple(line.split(maxsplit=1)) for line in text.splitlines()[2:]]
    assert said[0] == ("page", f"{URL}/  (open it in a browser)")
    assert ("models", "model-0") in said
    assert "model-7" in text
    assert "model-8" not in text
    assert "and 2 more: `quire models`" in text
    assert ("memory", "3.00 GiB for all together; a model is loaded when it is asked for") in said
    assert "and stays for 60 min after its last request" in text


def test_what_several_models_have_not_is_not_said(entries: list[dict[str, object]]) -> None:
    kept = settings(server={"page": False}, models={"keep_alive_s": -1})
    announce_several(kept, ["one"], 1 << 30, URL)
    text = str(entries[0]["banner"])
    assert "page" not in text
    assert "more" not in text
    assert "and stays\n" in text


def test_machines_read_which_of_several_models_there_are(entries: list[dict[str, object]]) -> None:
    announce_several(settings(log={"format": "json"}), ["one", "two"], 5, URL)
    (entry,) = entries
    assert (entry["models"], entry["memory_budget_bytes"]) == (["one", "two"], 5)
    assert "banner" not in entry
