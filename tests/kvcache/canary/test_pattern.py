import numpy as np

from kvcache.canary.trial import QUERIES_PER_HEAD, Pattern
from kvcache.layout import KVShape, KVSpec


def test_numbers_are_those_of_eight_bits_and_queries_are_keys_up_to_their_own() -> None:
    pattern = Pattern(10, KVShape.uniform(2, KVSpec(2, 64)))
    assert pattern.regions.shape == (4, 10, 2, 64)
    assert (pattern.regions * 64 == np.round(pattern.regions * 64)).all()
    queries = pattern.queries(1, 4, 3)
    assert queries.shape == (3, 2 * QUERIES_PER_HEAD, 64)
    for row, position in enumerate(range(4, 7)):
        for head in range(2 * QUERIES_PER_HEAD):
            past = pattern.regions[2][: position + 1, head // QUERIES_PER_HEAD]
            assert (past == queries[row, head]).all(axis=1).any()
