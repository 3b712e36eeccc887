"""What is said of a model is what its files say."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.models.checkpoint import read_checkpoint
from server.catalogue.local_models import local_models
from server.cli.model_facts import facts_of, model_facts
from tests.models import write_model


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    checkpoint = read_checkpoint(folder)
    facts = model_facts(checkpoint, weights_bytes=5, on_gpu=True)
    assert (facts.family, facts.quantization) == ("qwen3", checkpoint.dtype)
    assert facts.parameters == checkpoint.num_weights
    assert facts.size_bytes == checkpoint.stored_bytes
    assert facts.modified_at.timestamp() == 1_700_000_000
    assert (facts.weights_bytes, facts.on_gpu) == (5, True)
    assert len(bytes.fromhex(facts.digest)) == 32
    assert model_facts(checkpoint).digest == facts.digest
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert model_facts(checkpoint).digest != facts.digest


@pytest.mark.parametrize(
    "how", [{}, {"dtype": "bfloat16"}, {"bits": 4}, {"bits": 8}, {"bits": 4, "mode": "mxfp4"}]
)
def test_a_front_says_of_a_model_what_its_process_would(
    how: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", **how)
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    (model,) = local_models([folder], hub=False)
    assert facts_of(model) == model_facts(read_checkpoint(folder))


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ({"bits": 4, "group_size": 64}, "4bit"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "MXFP4"),
    ],
)
def test_packed_weights_have_the_name_of_their_packing(
    tmp_path: Path, packing: dict[str, object], said: str
) -> None:
    folder = write_model(tmp_path / "model")
    checkpoint = read_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": packing}
    (folder / "config.json").write_text(json.dumps(config))
    assert model_facts(checkpoint).quantization == said
