from kvcache.block_hashes import BlockHashes
from server.chat.salts import Salts

SECRET = bytes(range(32))


def test_a_salt_holds_nothing_of_what_it_was_made_from_and_has_one_length() -> None:
    salts = Salts(SECRET)
    for key, cache_salt in (("sk-zebra", "zebra"), ("k" * 999, "s" * 256)):
        salt = salts.salt(key, cache_salt)
        assert (len(salt.tenant), len(salt.client)) == (32, 32)
        assert "zebra" not in repr(salt) + repr(salts)
    assert salts.salt("", None).client == b""
    assert not salts.salt("", None).may_be_written, "the secret ends with the process"
    assert salts.digest_key != Salts(SECRET[::-1]).digest_key


def test_what_stays_in_memory_shares_there_with_what_may_be_written() -> None:
    salts = Salts(SECRET, outlives_process=True)
    written, kept_back = salts.salt("", None), salts.salt("", None, stays_in_memory=True)
    assert written.may_be_written
    assert not kept_back.may_be_written
    assert {written: "a dict finds it"}[kept_back]
    assert BlockHashes(b"", written, 1).parent(0) == BlockHashes(b"", kept_back, 1).parent(0)
