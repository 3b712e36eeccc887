from server.chat.salts import Salts

SECRET = bytes(range(32))


def test_a_salt_holds_nothing_of_what_it_was_made_from_and_has_one_length() -> None:
    salts = Salts(SECRET)
    for key, cache_salt in (("sk-zebra", "zebra"), ("k" * 999, "s" * 256)):
        salt = salts.salt(key, cache_salt)
        assert (len(salt.tenant), len(salt.client)) == (32, 32)
        assert "zebra" not in repr(salt) + repr(salts)
    assert salts.salt("", None).client == b""
    assert salts.digest_key != Salts(SECRET[::-1]).digest_key
