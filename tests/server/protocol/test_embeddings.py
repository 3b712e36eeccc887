import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from server.config import LimitsSection
from server.protocol.embeddings import EmbeddingRequest, embedding_pieces, shorten
from server.protocol.wire_errors import ApiError

LIMITS = LimitsSection()


def wire(**fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("given", "inputs", "names"),
    [
        ("a", ["a"], ["input"]),
        (["a", "b"], ["a", "b"], ["input[0]", "input[1]"]),
        ([1, 2], [[1, 2]], ["input"]),
        ([[1], [2, 3]], [[1], [2, 3]], ["input[0]", "input[1]"]),
    ],
)
def test_every_form_of_an_input_is_one_list(given: Any, inputs: Any, names: list[str]) -> None:
    found = wire(input=given)
    found.check(LIMITS)
    assert found.inputs == inputs
    assert [found.name_of(number) for number in range(len(inputs))] == names


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ([], "input"),
        (["a", ""], "input[1]"),
        ([[1], []], "input[1]"),
        ([[]], "input[0]"),
        (["a"] * 2049, "input"),
    ],
)
def test_what_is_empty_or_too_much_is_refused_by_name(given: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wire(input=given).check(LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("normalize", [None, True])
def test_vectors_are_always_of_length_1(normalize: bool | None) -> None:
    wire(input="a", normalize=normalize).check(LIMITS)
    with pytest.raises(ApiError) as caught:
        wire(input="a", normalize=False).check(LIMITS)
    assert caught.value.param == "normalize"


def test_a_vector_that_is_cut_has_length_1_again() -> None:
    vectors = np.array([[0.6, 0.0, 0.8], [0.0, 0.0, 1.0]], np.float32)
    assert shorten(vectors, None) is vectors
    assert shorten(vectors, 3) is vectors
    short = shorten(vectors, 2)
    assert short.dtype == np.float32
    assert short.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_both_encodings_hold_the_same_numbers() -> None:
    vectors = np.array([[0.25, -1.5], [3.0, 1e-9]], np.float32)
    plain, packed = (
        json.loads(b"".join(embedding_pieces(vectors, encoding, "m", 7)))
        for encoding in (None, "base64")
    )
    assert plain["usage"] == packed["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [one["index"] for one in plain["data"]] == [0, 1]
    for row, one, other in zip(vectors, plain["data"], packed["data"], strict=True):
        assert one["embedding"] == row.tolist()
        assert np.frombuffer(b64decode(other["embedding"]), "<f4").tolist() == row.tolist()
