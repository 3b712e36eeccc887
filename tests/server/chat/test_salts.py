import pytest
from starlette.datastructures import Headers

from server.chat.salts import Salts, bearer_token, request_key

SECRET = bytes(range(32))


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


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"Authorization": "Bearer a"}, "a"),
        ({"X-Api-Key": " a "}, "a"),
        ({"x-api-key": "a", "authorization": "Bearer b"}, "b"),
        ({"x-api-key": "a", "authorization": "Bearer "}, "a"),
        ({"x-api-key": "a", "authorization": "Basic eDp5"}, "a"),
    ],
)
def test_both_kinds_of_client_name_their_key(headers: dict[str, str], key: str) -> None:
    assert request_key(Headers(headers)) == key


def test_a_salt_holds_nothing_of_what_it_was_made_from_and_has_one_length() -> None:
    salts = Salts(SECRET)
    for key, cache_salt in (("sk-zebra", "zebra"), ("k" * 999, "s" * 256)):
        salt = salts.salt(key, cache_salt)
        assert (len(salt.tenant), len(salt.client)) == (32, 32)
        assert "zebra" not in repr(salt) + repr(salts)
    assert salts.salt("", None).client == b""
    assert salts.digest_key != Salts(SECRET[::-1]).digest_key
