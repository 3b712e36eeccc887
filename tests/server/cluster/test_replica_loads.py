"""How long each replica would take."""

from server.cluster.replica_loads import SMALLEST_CAPACITY, Load, ReplicaLoads

BLOCK = 16


def loads(*names: str) -> ReplicaLoads:
    its = ReplicaLoads(BLOCK)
    its.set(names)
    return its


def best(its: ReplicaLoads, tokens: int, *hits: tuple[int, int]) -> str | None:
    number = its.best(tokens, list(hits), its.alive)
    return None if number is None else its.name(number)


def report(its: ReplicaLoads, name: str, load: Load) -> None:
    replica = its.get(name)
    assert replica is not None
    its.report(replica, load)


def test_replicas_are_found_by_name_and_by_number() -> None:
    its = loads("a", "b")
    assert len(its) == 2
    b = its.get("b")
    assert b is not None
    assert (its.name(b.number), its.alive) == ("b", 0b11)
    assert its.get("c") is None


def test_numbers_of_removed_replicas_go_to_others_and_nobody_else_moves() -> None:
    its = loads("a", "b", "c")
    assert its.set(["d", "c", "a"]) == 0b010
    assert [its.name(number) for number in range(3)] == ["a", "d", "c"]
    assert its.alive == 0b111
    assert its.set(["c", "d", "c"]) == 0b001
    assert its.alive == 0b110


def test_there_is_room_for_any_number_of_replicas() -> None:
    names = [f"r{number}" for number in range(5 * SMALLEST_CAPACITY)]
    its = loads(*names[:3])
    its.set(names)
    assert its.alive == 2 ** len(names) - 1
    assert {its.name(number) for number in range(len(names))} == set(names)
    assert its.set([]) == 2 ** len(names) - 1
    assert best(its, 10) is None


def test_without_reports_the_replica_with_the_largest_hit_is_best() -> None:
    its = loads("a", "b", "c")
    assert best(its, 1000, (100, 0b111), (900, 0b100)) == "c"
    assert best(its, 1000, (100, 0b010)) == "b"


def test_of_equals_the_one_with_less_waiting_is_best() -> None:
    its = loads("a", "b")
    a = its.get("a")
    assert a is not None
    its.place(a, 500)
    # 500 wait at a, which holds as many of the prompt.
    assert best(its, 1000, (500, 0b01)) == "b"


def test_a_faster_replica_is_best_until_enough_waits_there() -> None:
    its = loads("slow", "fast")
    report(its, "slow", Load(0, 0, 100, 100, 1.0))
    report(its, "fast", Load(0, 0, 100, 100, 4.0))
    fast = its.get("fast")
    assert fast is not None
    its.place(fast, 290)
    assert best(its, 100) == "fast"
    its.place(fast, 20)
    assert best(its, 100) == "slow"
    its.begin_answer(fast, 290)
    its.end_answer(fast)
    assert best(its, 100) == "fast"


def test_placed_tokens_are_remembered_in_proportion() -> None:
    its = loads("a", "b")
    for name in ("a", "b"):
        report(its, name, Load(0, 0, 0, 10, 1.0))
    a, b = its.get("a"), its.get("b")
    assert a is not None
    assert b is not None
    for replica, tokens in ((a, 100), (b, 150), (b, 50)):
        its.place(replica, tokens)
        its.begin_answer(replica, tokens)
        its.end_answer(replica)
    assert list(its._placed_tokens[:2]) == [50.0, 100.0]
    assert best(its, 10) == "a"


def test_a_conversation_leaves_its_replica_only_for_more_than_patience() -> None:
    its = loads("a", "b")
    for name in ("a", "b"):
        report(its, name, Load(0, 0, 100, 100, 1000.0))
    a = its.get("a")
    assert a is not None
    its.place(a, 1500)
    # 1.6 s at a, which holds 900 of 1000 tokens; 1 s at b.
    hits = [(900, 0b01)]
    assert its.best(1000, hits, its.alive) == 1
    assert its.best(1000, hits, its.alive, patience_s=0.5) == 1
    assert its.best(1000, hits, its.alive, patience_s=0.7) == 0
