"""Drafts in a whole engine: the same tokens in fewer steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.types import DraftReport, SamplingParams, TokenEvent
from kvcache.user_folders import cache_folder
from tests.engines import CONFIG, built_loop, request_of, run_dry

ANSWER_TOKENS = 60
PROMPT = tuple(range(40))


def answer_to(
    folder: Path, prediction: list[int], *, drafts: bool, temperature: float = 0.7
) -> tuple[list[int], int, DraftReport | None]:
    """Return the tokens, the number of steps, and how drafts fared."""
    events: list[TokenEvent] = []
    config = replace(CONFIG, page_bytes=None, kv_budget_bytes=None, overlap=True, drafts=drafts)
    loop = built_loop(folder, config, events.extend)
    params = SamplingParams(ANSWER_TOKENS, temperature=temperature, seed=5)
    loop.mailbox.put(request_of(1, PROMPT, params, prediction_ids=tuple(prediction)))
    run_dry(loop)
    steps = loop.stats.steps
    loop.close()
    tokens = [event.token_id for event in events if event.token_id is not None]
    return tokens, steps, events[-1].drafts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_right_prediction_gives_the_same_tokens_in_fewer_steps(
    tiny_model: Path, temperature: float
) -> None:
    plain, steps, report = answer_to(tiny_model, [], drafts=False, temperature=temperature)
    assert (len(plain), report) == (ANSWER_TOKENS, None)
    tokens, fewer, report = answer_to(tiny_model, plain, drafts=True, temperature=temperature)
    assert tokens == plain
    assert fewer < steps / 2
    assert report is not None
    assert report.accepted > ANSWER_TOKENS / 2


@pytest.mark.parametrize("wrong_at", [0, 1, 7, 20, 59])
def test_a_wrong_prediction_gives_the_same_tokens(tiny_model: Path, wrong_at: int) -> None:
    plain, _, _ = answer_to(tiny_model, [], drafts=False)
    prediction = [*plain]
    prediction[wrong_at] += 1
    assert answer_to(tiny_model, prediction, drafts=True)[0] == plain


def test_predictions_are_not_read_where_drafts_are_off(tiny_model: Path) -> None:
    plain, steps, _ = answer_to(tiny_model, [], drafts=False)
    assert answer_to(tiny_model, plain, drafts=False) == (plain, steps, None)


def test_an_engine_that_restarts_begins_with_the_costs_that_it_learnt(tiny_model: Path) -> None:
    plain, steps, _ = answer_to(tiny_model, [], drafts=False)
    assert answer_to(tiny_model, plain, drafts=True)[0] == plain
    (file,) = cache_folder().glob("costs-*")
    record = json.loads(file.read_text())
    assert max(map(int, record["steps"])) > 4, "steps with drafts were measured"
    file.write_text(json.dumps(record | {"steps": {"1": 1.0, "2": 9.0, "8": 99.0}}))
    assert answer_to(tiny_model, plain, drafts=True) == (plain, steps, None)
