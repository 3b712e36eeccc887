from kvcache.canary.run import USUAL, CacheSize


def test_a_size_crosses_a_command_line() -> None:
    assert CacheSize.from_argument(USUAL.to_argument()) == USUAL
