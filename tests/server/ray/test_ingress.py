"""The front in a process of Ray's, around replicas of this process."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from server.cli.serve_models import plain_settings
from server.config import Config, StartError
from server.ray import ingress
from server.ray.ingress import CheckingCompiler, Ingress
from server.ray.replica_calls import UncompiledConstraint
from server.text.conversation import OutputFormat
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.vocabulary import Vocabulary
from server.text.grammar.worker import GrammarLimits, GrammarWorker
from server.text.tokenizer import Tokenizer
from tests.server.ray.local_replicas import LocalReplicas

WAIT_S = 10.0


def settings_file(folder: Path, port: int, **access: object) -> str:
    settings = Config.model_validate(
        {
            "server": {"port": port, "drain_s": 1},
            "log": {"level": "error"},
            "access": access,
        }
    )
    path = folder / "settings.json"
    path.write_text(json.dumps(plain_settings(settings)))
    return str(path)


@pytest.fixture
async def replicas(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalReplicas]:
    local = LocalReplicas(2)
    monkeypatch.setattr(ingress, "RayReplicas", lambda handle: handle)
    yield local
    local.stop()


async def listening(front: Ingress) -> str:
    await front.check_health()
    async with asyncio.timeout(WAIT_S):
        while not (url := await front.url()):
            await asyncio.sleep(0.01)
    return url


async def test_clients_are_answered_by_replicas_until_it_is_drained(
    replicas: LocalReplicas, tmp_path: Path, tiny_model: Path
) -> None:
    file = settings_file(tmp_path, 0, api_keys=["sk-one-0123456789", "sk-two-0123456789"])
    front = Ingress(replicas, str(tiny_model), file)
    await front.drain()  # there is nothing yet
    url = await listening(front)
    await front.check_health()
    key = {"authorization": "Bearer sk-one-0123456789"}
    async with httpx2.AsyncClient(base_url=url, headers=key, timeout=WAIT_S) as client:
        body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (
            await client.post("/v1/completions", json=body, headers={"authorization": ""})
        ).status_code == 401
        page = ""
        async with asyncio.timeout(WAIT_S):
            while "quire_replicas 2.0" not in page:
                page = (await client.get("/metrics")).text
        assert (await client.get("/ready")).status_code == 200
        path = (await client.get("/version")).json()["replicas"]
        assert [its["state"] for its in (await client.get(path)).json()["replicas"]] == ["up"] * 2
        assert (await client.get(path, headers={"authorization": ""})).status_code == 401
    await front.drain()
    with pytest.raises(RuntimeError, match="has ended"):
        await front.check_health()


async def test_a_model_that_is_not_there_is_said(replicas: LocalReplicas, tmp_path: Path) -> None:
    front = Ingress(replicas, str(tmp_path / "none"), settings_file(tmp_path, 0))
    with pytest.raises(StartError):
        await listening(front)
    with pytest.raises(RuntimeError, match="none"):
        await front.check_health()


async def test_where_no_form_can_be_enforced_it_says_so_and_serves(
    replicas: LocalReplicas, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(CheckingCompiler, "load", lambda _: "no form")
    monkeypatch.setattr(ingress, "log", SimpleNamespace(warning=said.append, info=lambda _: None))
    front = Ingress(replicas, str(tiny_model), settings_file(tmp_path, 0))
    await listening(front)
    assert said == ["no form"]
    await front.drain()


async def test_a_form_is_checked_and_sent_as_it_was_asked_for(tokenizer: Tokenizer) -> None:
    limits = GrammarLimits(5.0)
    compiler = CheckingCompiler(
        Vocabulary(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.end_ids)),
        lambda made: GrammarWorker(made.text, made.facts, limits),
        limits,
    )
    try:
        spec = ConstraintSpec(OutputFormat("regex", "[0-9]+", "guided_regex"))
        sent: object = await compiler.compile(spec, "1")
        assert sent == UncompiledConstraint(spec, "1")
        assert await compiler.compile(ConstraintSpec()) is None
        with pytest.raises(GrammarError):
            await compiler.compile(ConstraintSpec(OutputFormat("regex", "(", "guided_regex")))
    finally:
        await compiler.close()
