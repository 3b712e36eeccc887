import json
from base64 import b64decode

import numpy as np

from server.protocol.embeddings import embedding_pieces, shorten


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
