from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from server.protocol.ollama.answer import (
    Loaded,
    ModelFacts,
    ModelInfo,
    show_answer,
    tags_answer,
    time_from_ns,
    version_answer,
)

# Below it VS Code uses no server.
VS_CODES_LEAST = (0, 6, 4)
FACTS = ModelFacts(
    family="qwen3",
    parameters=4_022_000_000,
    quantization="4bit",
    size_bytes=2_260_000_000,
    digest="ab" * 32,
    modified_at=datetime(2026, 11, 23, 15, 0, tzinfo=timezone(timedelta(hours=1))),
)
INFO = ModelInfo("org/name", FACTS, 32_768, ("completion",), template="{{ messages }}")


def test_all_models_are_listed_loaded_or_not() -> None:
    there = replace(INFO, name="other", loaded=Loaded(5, 6))
    first, second = tags_answer([INFO, there])["models"]
    assert first == {
        "name": "org/name",
        "model": "org/name",
        "modified_at": "2026-11-23T14:00:00.000000Z",
        "size": 2_260_000_000,
        "digest": "ab" * 32,
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": "qwen3",
            "families": ["qwen3"],
            "parameter_size": "4.0B",
            "quantization_level": "4bit",
        },
    }
    assert second["name"] == "other"


def test_a_model_is_shown_with_the_context_that_it_would_have() -> None:
    shown = show_answer(INFO)
    assert shown["model_info"] == {
        "general.architecture": "qwen3",
        "general.basename": "org/name",
        "general.parameter_count": 4_022_000_000,
        "qwen3.context_length": 32_768,
    }
    assert shown["capabilities"] == ["completion"]
    assert shown["template"] == "{{ messages }}"
    assert shown["details"]["family"] == "qwen3"


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0"), (999, "999"), (595_800_000, "595.8M"), (8_190_000_000, "8.2B"), (10**12, "1.0T")],
)
def test_numbers_are_said_as_people_say_them(number: int, said: str) -> None:
    card = replace(INFO, facts=replace(FACTS, parameters=number))
    assert show_answer(card)["details"]["parameter_size"] == said


def test_the_version_is_none_that_clients_refuse() -> None:
    version = tuple(int(part) for part in version_answer()["version"].split("."))
    assert version >= VS_CODES_LEAST


def test_a_time_has_all_of_its_digits() -> None:
    assert time_from_ns(1_764_000_000 * 10**9 + 5) == "2025-11-24T16:00:00.000000005Z"
