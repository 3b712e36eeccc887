import math

import pytest

from server.supervisor.keep_alive import MAX_CLIENTS, NOBODY, KeepAlive


def test_who_asks_for_nothing_keeps_the_model_for_the_usual_time() -> None:
    keep = KeepAlive(60.0)
    keep.used(b"one", 100.0, None)
    assert keep.until == 160.0


def test_a_long_time_counts_and_a_short_one_only_where_nobody_else_came_since() -> None:
    keep = KeepAlive(60.0)
    keep.used(b"one", 100.0, 500.0)
    keep.used(b"two", 110.0, 0.0)
    assert keep.until == 600.0
    keep.used(b"one", 120.0, 5.0)
    assert keep.until == 125.0, "the other one wants it no more"
    keep.used(b"two", 130.0, -1.0)
    assert keep.until == math.inf


def test_the_first_client_decides_about_a_model_that_was_loaded_for_it() -> None:
    keep = KeepAlive(60.0)
    keep.used(NOBODY, 100.0, None)
    assert keep.until == 160.0
    keep.used(b"one", 101.0, 0.0)
    assert keep.until == 101.0
    keep.forget()
    assert keep.until == 0.0


def test_a_default_may_be_for_ever() -> None:
    keep = KeepAlive(-1.0)
    keep.used(b"one", 100.0, None)
    assert keep.until == math.inf


@pytest.mark.parametrize("more", [1, 2, 10, 100, 1000, 10_000])
def test_of_many_clients_those_are_remembered_that_want_the_model_for_longest(more: int) -> None:
    keep = KeepAlive(60.0)
    clients = [str(number).encode() for number in range(MAX_CLIENTS + more)]
    for number, client in enumerate(clients):
        keep.used(client, 0.0, 100.0 + number)
    assert keep.until == 100.0 + len(clients) - 1
    for client in clients[-MAX_CLIENTS:]:
        keep.used(client, 1.0, 0.0)
    assert keep.until == 1.0, "all others are forgotten"
