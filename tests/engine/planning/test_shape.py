from pathlib import Path

import pytest

from engine.models.checkpoint import CheckpointError, read_checkpoint
from engine.models.config import Quantization
from engine.planning.shape import ModelShape, read_shape
from tests.models import QWEN3_4B, TINY, write_config


def test_qwen3_4b_has_the_parameters_that_its_files_have(qwen3_4b: ModelShape) -> None:
    assert qwen3_4b.parameters == 4_022_468_096
    assert qwen3_4b.matrix_numbers == 4_022_272_000
    assert qwen3_4b.kv_numbers_per_token == 2 * 36 * 1024


def test_an_output_matrix_of_its_own_counts(tmp_path: Path) -> None:
    untied = read_shape(write_config(tmp_path, QWEN3_4B, tie_word_embeddings=False))
    assert untied.parameters == 4_022_468_096 + 151936 * 2560
    assert not untied.spec.tied_embeddings


def test_the_shape_agrees_with_the_checkpoint(tiny_model: Path) -> None:
    shape, checkpoint = read_shape(tiny_model), read_checkpoint(tiny_model)
    assert shape.parameters == checkpoint.num_weights
    assert shape.spec == checkpoint.spec


def test_packed_weights_are_known_from_the_config(tmp_path: Path) -> None:
    packed = write_config(tmp_path, TINY, quantization={"bits": 4, "group_size": 64})
    assert read_shape(packed).quantization == Quantization(4, 64)


def test_a_wrong_config_is_named_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: head_dim is 'wide'"):
        read_shape(write_config(tmp_path, TINY, head_dim="wide"))
