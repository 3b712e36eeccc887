from tests.bench.options import Options, read_options


def options(*arguments: str) -> Options:
    return read_options(arguments, "what it is")


def test_prompts_are_new_in_every_run_unless_a_seed_is_given() -> None:
    first, second = options(), options()
    assert next(first.contest.seeds) != next(second.contest.seeds)
    again = options("--seed", str(first.seed))
    assert next(again.contest.seeds) + 1 == next(first.contest.seeds)
