import pytest

from server.salts import Salts, bearer_token


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, ""),
        ("", ""),
        ("Bearer", ""),
        ("Bearer ", ""),
        ("Bearer sk-1", "sk-1"),
        ("bearer  sk-1 ", "sk-1"),
        ("BEARER sk 1", "sk 1"),
        ("Basic c2stMQ==", ""),
        ("sk-1", ""),
    ],
)
def test_the_key_is_what_the_bearer_carries(header: str | None, token: str) -> None:
    assert bearer_token(header) == token


def test_the_same_key_and_salt_share_and_no_others() -> None:
    salts = Salts()
    headers = (None, "Bearer a", "Bearer b", "Bearer é")
    found = {salts.salt(header, salt) for header in headers for salt in (None, "a", "b", "é")}
    assert len(found) == 16
    assert found == {salts.salt(header, s) for header in headers for s in (None, "a", "b", "é")}


def test_those_without_a_key_are_one_tenant() -> None:
    salts = Salts()
    assert salts.salt(None, "x") == salts.salt("Basic eDp5", "x") == salts.salt("Bearer ", "x")


def test_a_salt_holds_nothing_of_what_it_was_made_from_and_has_one_length() -> None:
    salts = Salts()
    for header, cache_salt in (("Bearer sk-zebra", "zebra"), ("Bearer " + "k" * 999, "s" * 256)):
        salt = salts.salt(header, cache_salt)
        assert (len(salt.tenant), len(salt.client)) == (32, 32)
        assert "zebra" not in repr(salt) + repr(salts)
    assert salts.salt(None, None).client == b""


def test_another_process_makes_other_salts() -> None:
    one, other = Salts().salt("Bearer a", "b"), Salts().salt("Bearer a", "b")
    assert one.tenant != other.tenant
    assert one.client != other.client
