from hashlib import sha256

import pytest

from kvcache.block_hashes import BlockHashes, PrefixSalt

SIZE = 4


def hashes_of(
    tokens: list[int], salt: PrefixSalt | None = None, identity: bytes = b"model"
) -> BlockHashes:
    hashes = BlockHashes(identity, salt or PrefixSalt(), SIZE)
    hashes.extend(tokens, 0)
    return hashes


def test_the_chain_has_a_digest_per_full_block() -> None:
    hashes = hashes_of(list(range(10)))
    assert hashes.num_tokens == 10
    assert len(hashes.digests) == len(hashes.tokens) == 2
    assert hashes.tail == bytes([0, 0, 0, 8, 0, 0, 0, 9])


def test_a_digest_is_that_of_its_parent_and_its_ids() -> None:
    hashes = hashes_of(list(range(8)))
    second = b"".join(token.to_bytes(4, "big") for token in range(4, 8))
    assert hashes.digests[1] == sha256(hashes.digests[0] + second).digest()
    assert hashes.parent(1) == hashes.digests[0]


def test_growing_token_by_token_gives_the_same_chain() -> None:
    grown = hashes_of([])
    for place, token in enumerate(range(100, 123)):
        grown.extend([token], place)
    assert grown.digests == hashes_of(list(range(100, 123))).digests


def test_ids_that_the_chain_has_are_skipped() -> None:
    hashes = hashes_of(list(range(10)))
    hashes.extend(list(range(12)), 0)
    hashes.extend([6, 7], 6)
    assert hashes.digests == hashes_of(list(range(12))).digests
    assert hashes.num_tokens == 12


def test_a_hole_in_the_chain_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="tokens 2 to 3 are missing"):
        hashes_of([1, 2]).extend([9], 3)


def test_equal_tokens_after_different_ones_have_different_digests() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert one.tokens[1] == other.tokens[1]
    assert one.digests[1] != other.digests[1]


@pytest.mark.parametrize(
    ("identity", "salt"),
    [
        (b"other model", PrefixSalt()),
        (b"model", PrefixSalt(tenant=b"key")),
        (b"model", PrefixSalt(client=b"key")),
        (b"model", PrefixSalt(tenant=b"k", client=b"ey")),
    ],
)
def test_other_models_and_other_salts_have_other_digests(identity: bytes, salt: PrefixSalt) -> None:
    assert hashes_of([1] * 4, salt, identity).digests != hashes_of([1] * 4).digests


def test_the_last_token_is_never_shared() -> None:
    assert [hashes_of([0] * n).shareable_blocks for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    hashes = hashes_of([0] * 9)
    for most, blocks in ((0, 0), (3, 0), (4, 1), (8, 2), (None, 2)):
        hashes.max_cached_tokens = most
        assert hashes.shareable_blocks == blocks
