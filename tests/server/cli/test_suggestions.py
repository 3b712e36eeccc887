"""The models that `quire pull`, `quire run` and `quire plan` list where none is named."""

import json
from pathlib import Path

import pytest

from engine.planning.memory import read_shape
from server.catalogue.lookup import aliases
from server.cli.plan import LONG_PROMPT, Target
from server.cli.suggestions import SLOWEST_TOKENS_PER_S, configs, estimates, suggest
from server.config import Config
from tests.server.commands import SETTINGS, Run, one_sentence

# Billions of parameters, as the models' makers give them for text.
PARAMETERS = {
    "qwen3.6:35b": 34.7,
    "qwen3-coder:30b": 30.5,
    "qwen3.6:27b": 26.9,
    "bonsai-2:27b": 26.9,
    "qwen3:14b": 14.8,
    "qwen3.5:9b": 8.95,
    "qwen3:8b": 8.2,
    "llama3.1:8b": 8.03,
    "qwen3.5:4b": 4.2,
    "qwen3:4b": 4.02,
    "llama3.2:3b": 3.21,
    "qwen3:1.7b": 1.72,
    "qwen3.5:0.8b": 0.75,
    "qwen3:0.6b": 0.596,
}


@pytest.mark.parametrize(("name", "config"), configs().items())
def test_a_suggested_model_has_the_size_that_its_makers_give(
    tmp_path: Path, name: str, config: dict[str, object]
) -> None:
    assert name in aliases(), "so that `quire pull` finds it"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path).parameters == pytest.approx(PARAMETERS[name] * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("device", "memory", "names"),
    [
        ("M1", "8GiB", ["qwen3.5:4b", "qwen3:4b", "llama3.2:3b", "qwen3:1.7b", "qwen3.5:0.8b"]),
        ("M4", "16GiB", ["bonsai-2:27b", "qwen3.5:9b", "qwen3:8b", "llama3.1:8b", "qwen3.5:4b"]),
        ("M4 Pro", "24GiB", ["bonsai-2:27b", "qwen3:14b", "qwen3.5:9b", "qwen3:8b", "llama3.1:8b"]),
        (
            "M4 Max",
            None,
            ["qwen3.6:35b", "qwen3-coder:30b", "qwen3.6:27b", "bonsai-2:27b", "qwen3:14b"],
        ),
        ("M5", "5GiB", ["qwen3.5:0.8b", "qwen3:0.6b"]),
        (
            "cpu",
            "24GiB",
            ["qwen3-coder:30b", "qwen3.5:9b", "qwen3:8b", "llama3.1:8b", "qwen3.5:4b"],
        ),
    ],
)
def test_the_largest_models_that_are_of_use_are_listed(
    device: str, memory: str | None, names: list[str]
) -> None:
    text = suggest(None, memory=memory, device=device)
    rows = [line.split() for line in text.split("\n\n")[1].splitlines()[1:]]
    assert [row[0] for row in rows] == names
    fits = dict(estimates(Config(), Target.of(device, memory)))
    for name, _, _, context, per_s, *_ in rows:
        assert int(context) == fits[name].plan.memory.max_model_len >= LONG_PROMPT
        assert float(per_s) >= SLOWEST_TOKENS_PER_S
    assert "Computed, not measured" in text
    assert f"`quire pull {names[0]}`" in text


@pytest.mark.parametrize("command", ["pull", "run", "plan"])
def test_a_command_without_a_model_lists_what_fits_here(quire: Run, command: str) -> None:
    result = quire(command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(("Models that fit ", "No model that quire suggests fits "))


def test_a_machine_that_holds_none_is_told_of_the_demo(quire: Run) -> None:
    text = quire("plan", "--device", "M1", "--memory", "1GiB").stdout
    assert text.startswith("No model that quire suggests fits M1 with 1.00 GiB: `quire run demo`")
    line = one_sentence(quire("plan", "--memory", "lots"), SETTINGS)
    assert line == "quire: --memory 'lots' is not a size such as 24GiB"
