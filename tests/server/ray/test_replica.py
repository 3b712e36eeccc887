"""A replica around a real engine, as Ray starts, asks and ends it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.types import SamplingParams, Submission
from server.cli.serve_models import plain_settings
from server.config import Config
from server.ray import facts, replica
from server.ray.facts import UnlikeError, facts_of
from server.ray.messages import Route
from server.ray.replica import NotReadyError, Replica, own_name, why_not_here
from tests.models import write_embedding_model
from tests.server.ray import fake_ray

SETTINGS = plain_settings(
    Config.model_validate(
        {
            "cache": {"kv_budget": "16MiB", "substrate": "posix"},
            "engine": {"threads": 1},
            "log": {"level": "error"},
        }
    )
)


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "version", lambda _: "1")


@pytest.fixture
def head(tiny_model: Path) -> Any:
    return facts_of(tiny_model)


@pytest.fixture
def made(tiny_model: Path, head: Any) -> Iterator[Replica]:
    one = Replica(str(tiny_model), SETTINGS, head, "one")
    yield one
    one.__del__()


async def test_a_replica_answers_and_says_how_it_is(made: Replica) -> None:
    await made.check_health()
    await made.check_health()
    submission = Submission((1, 2, 3), (SamplingParams(4, temperature=0.0),))
    batches = [batch async for batch in made.generate(Route(), submission)]
    assert sum(len(batch) for batch in batches if isinstance(batch, list)) == 4
    assert (await made.report(Route())).name == "one"
    assert (await made.memory_map(Route())).stats.generated_tokens >= 4
    made.__del__()
    with pytest.raises(NotReadyError):
        await made.check_health()


async def test_a_model_of_vectors_is_served_without_grammars(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "model")
    one = Replica(str(folder), SETTINGS, facts_of(folder), "one")
    submission = Submission((1, 2, 3), (SamplingParams(0),), pooling=True)
    await one.check_health()
    events = [
        event
        async for batch in one.generate(Route(), submission)
        if isinstance(batch, list)
        for _, event in batch
    ]
    assert events[-1].embedding is not None
    one.__del__()


def test_a_machine_that_is_unlike_is_refused(tiny_model: Path, head: Any) -> None:
    other = {**head, "quire": "2"}
    with pytest.raises(UnlikeError, match="quire is 1"):
        Replica(str(tiny_model), SETTINGS, other, "one")
    assert "quire is 1" in why_not_here(str(tiny_model), SETTINGS, other)
    assert why_not_here(str(tiny_model), SETTINGS, head) == ""


def test_a_model_that_does_not_fit_is_said(tiny_model: Path, head: Any) -> None:
    small = {**SETTINGS, "cache": {**SETTINGS["cache"], "kv_budget": 1}}
    assert why_not_here(str(tiny_model), small, head) != ""


def test_a_replica_is_called_as_ray_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context = fake_ray.replica("abc")
    serve = {"get_replica_context": lambda: context}
    fake_ray.install(monkeypatch, ray={}, ray__serve=serve)
    assert own_name() == "abc"


def test_one_that_did_not_start_has_nothing_to_end() -> None:
    Replica.__new__(Replica).__del__()
    assert replica.Replica is Replica
