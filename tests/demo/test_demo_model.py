"""The bundled model through the real server, as ``make serve`` and curl use it."""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import mlx.core as mx
import pytest
from openai import OpenAI

from tests.bench.peers import ROOT, Program, Server

FOLDER = ROOT / "configs" / "demo"
MODEL = FOLDER / "model"
MAX_MODEL_BYTES = 10_000_000
CASES: list[dict[str, Any]] = json.loads((FOLDER / "questions.json").read_text())
BASICS = [case for case in CASES if case.get("basic")]


def name_of(case: dict[str, Any]) -> str:
    thinking = "thinking" if case["enable_thinking"] else "plain"
    return f"{case['messages'][-1]['content']} {thinking}"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    program = Program("the demo", "quire", ("serve", str(MODEL)), "model")
    with Server(program, threads=2) as server:
        base_url = f"http://{server.target.host}:{server.target.port}/v1"
        with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30) as client:
            yield client


@pytest.mark.parametrize("case", BASICS, ids=name_of)
def test_a_basic_question_gets_a_streamed_answer_that_makes_sense(
    client: OpenAI, case: dict[str, Any]
) -> None:
    stream = client.chat.completions.create(
        model="model",
        messages=case["messages"],
        temperature=0,
        max_tokens=300,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": case["enable_thinking"]}},
    )
    content, thought, finish = "", "", None
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        finish = choice.finish_reason or finish
    assert finish == "stop"
    assert bool(thought) == case["enable_thinking"]
    for pattern in case["must_match"]:
        assert re.search(pattern, content, re.IGNORECASE), content


def test_the_model_is_small_and_has_the_template_that_it_was_trained_with() -> None:
    files = [path for path in MODEL.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_MODEL_BYTES
    template = (MODEL / "chat_template.jinja").read_text()
    assert template == (FOLDER / "chat_template.jinja").read_text()


def test_the_head_beside_the_model_has_the_names_and_shapes_of_one_more_layer() -> None:
    model, head = (
        cast(dict[str, mx.array], mx.load(str(MODEL / name)))
        for name in ("model.safetensors", "mtp.safetensors")
    )
    layer = {name: array.shape for name, array in model.items() if ".layers.0." in name}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    expected = {name.replace("model.", "mtp.", 1): shape for name, shape in layer.items()}
    expected |= {f"mtp.{norm}.weight": (256,) for norm in norms} | {"mtp.fc.weight": (256, 512)}
    assert {name: array.shape for name, array in head.items()} == expected
    assert {array.dtype for array in head.values()} == {mx.bfloat16}


def test_the_basics_are_what_a_newcomer_asks() -> None:
    asked = {case["messages"][-1]["content"] for case in BASICS}
    assert {"What is quire?", "What is a sparse buffer?", "What is a block?"} <= asked
    assert {"What is a prefix hit?", "How do I start quire?"} <= asked
    assert {case["enable_thinking"] for case in BASICS} == {True, False}
