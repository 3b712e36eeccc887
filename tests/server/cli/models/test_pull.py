"""``quire pull``: what it says, and that it says it before the first byte of weights."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from server.catalogue import hub as hub_module
from server.catalogue.hub import find_model
from tests.models import QWEN3_4B
from tests.server.commands import MODEL, SETTINGS, Run
from tests.server.hub_server import Files, Hub

BIG = asdict(QWEN3_4B) | {"num_hidden_layers": 4000}


def changed(files: Files, **changes: Any) -> Files:
    """With other fields in config.json."""
    config = files["config.json"]
    assert isinstance(config, bytes)
    return files | {"config.json": json.dumps(json.loads(config) | changes).encode()}


@pytest.mark.parametrize(
    ("files", "code", "problem"),
    [
        (lambda files: changed(files, model_type="gpt9"), MODEL, "model_type is 'gpt9'; quire ser"),
        (
            lambda files: changed(files, **BIG),
            SETTINGS,
            "alone take .*; --force fetches it all the",
        ),
        (lambda files: {"a.gguf": 5}, MODEL, "this is GGUF, and quire reads safetensors"),
        (
            lambda files: {k: v for k, v in files.items() if k != "tokenizer.json"},
            MODEL,
            r"tokenizer\.json: the file does not exist",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_a_byte_of_its_weights(
    files: Callable[[Files], Files],
    code: int,
    problem: str,
    hub: Hub,
    tiny_files: Files,
    quire: Run,
) -> None:
    hub.push("someone/model", files(tiny_files))
    result = quire("pull", "someone/model")
    assert result.exit_code == code
    assert re.search(problem, result.stderr), result.output
    assert result.stderr.count("\n") == 1
    assert "model.safetensors" not in hub.sent_bytes


def test_a_gated_model_is_refused_before_a_byte_of_its_weights(
    hub: Hub, tiny_files: Files, quire: Run
) -> None:
    hub.push("someone/model", tiny_files)
    hub.gated.add("someone/model")
    result = quire("pull", "someone/model")
    assert result.exit_code == MODEL
    assert "accepted their licence: do so at http" in result.stderr
    assert hub.sent_bytes == {}


def test_a_disk_without_room_is_refused_before_a_byte_of_the_weights(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.cli.models import pull

    hub.push("someone/model", tiny_files)
    for module in (hub_module, pull):
        monkeypatch.setattr(module, "free_bytes", lambda _: 1000)
    result = quire("pull", "someone/model", "--dry-run")
    assert result.exit_code == MODEL
    assert "has 1000 bytes left: make room" in result.stderr
    assert "1000 bytes are free in " in result.stdout
    assert set(hub.sent_bytes) <= {"config.json", "generation_config.json"}


def test_a_dry_run_says_all_and_fetches_what_the_model_is_alone(
    hub: Hub, tiny_files: Files, quire: Run
) -> None:
    commit = hub.push("someone/model", tiny_files)
    result = quire("pull", "someone/model", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        f"someone/model, commit {commit[:12]}: qwen3, 0.14 million parameter"
    )
    assert re.fullmatch(
        r"weights: (\d+ bytes) of \1 are to be fetched; .* are free in .*cache", lines[1]
    )
    assert re.search(r"serves it with \d+ tokens of context; a token of K and V takes", lines[2])
    assert set(hub.sent_bytes) == {"config.json", "generation_config.json"}


def test_a_model_is_fetched_once_and_a_pin_is_kept(hub: Hub, tiny_files: Files, quire: Run) -> None:
    old = hub.push("someone/model", tiny_files)
    hub.push("someone/model", changed(tiny_files, num_hidden_layers=7))
    result = quire("pull", f"someone/model@{old}")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert f"`quire serve someone/model@{old}` serves it." in result.stdout
    assert "model.safetensors" in hub.sent_bytes
    hub.sent_bytes.clear()
    again = quire("pull", f"someone/model@{old}")
    assert "all of them here" in again.stdout
    assert hub.sent_bytes == {}
    assert not (Path(constants.HF_HUB_CACHE) / "models--someone--model/refs").exists()


def test_one_that_is_too_large_for_here_can_be_fetched_for_elsewhere(
    hub: Hub, tiny_files: Files, quire: Run, tmp_path: Path
) -> None:
    hub.push("someone/model", tiny_files)
    settings = tmp_path / "quire.toml"
    settings.write_text("[cache]\nkv_budget = '900000GiB'\n")
    refused = quire("pull", "someone/model", "--config", settings)
    assert (refused.exit_code, "model.safetensors" in hub.sent_bytes) == (SETTINGS, False)
    forced = quire("pull", "someone/model", "--config", settings, "--force")
    assert forced.exit_code == 0
    assert "this machine cannot serve it: " in forced.stdout
    assert find_model("someone/model").missing == ()


def test_offline_it_says_what_is_here_and_what_is_not(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    find_model("someone/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = quire("pull", "someone/model")
    assert result.exit_code == MODEL
    assert "HF_HUB_OFFLINE is set: unset it to download" in result.stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = quire("pull", "someone/model", "--dry-run")
    assert "because the hub did not answer: " in result.stdout
    assert re.search(r"weights: (\d+ bytes) of \1 are to be fetched", result.stdout)


def test_a_folder_needs_no_pull(quire: Run, tiny_model: Path) -> None:
    result = quire("pull", tiny_model)
    assert result.exit_code == MODEL
    assert f"this is {tiny_model}, on this disk: nothing is to be done" in result.stderr


def test_a_plan_of_a_model_on_the_hub_fetches_no_weights(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.planning import capacity

    monkeypatch.setattr(capacity, "REQUESTS", 8)
    hub.push("someone/model", tiny_files)
    result = quire("plan", "someone/model", "--context", "256")
    assert result.exit_code == 0, result.output
    assert re.match(r"not here yet: (\d+ bytes) of \1 of weights; sizes are", result.stdout)
    assert "substrate: " in result.stdout
    assert set(hub.sent_bytes) == {"config.json", "generation_config.json"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    again = quire("plan", "someone/model", "--context", "256")
    assert "because the hub did not answer" in again.stdout
