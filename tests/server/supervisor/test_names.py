import pytest

from server.supervisor.front import ModelNames

MODELS = ("mlx-community/Qwen3-4B-4bit", "Qwen/Qwen3-0.6B", "own", "other/Qwen3-0.6B")
ALIASES = {"gpt-*": "loaded", "fast": "own", "gone": "no/such"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit:latest", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3-4B-4bit/", "mlx-community/Qwen3-4B-4bit"),
        ("whoever/own", "own"),
        ("whoever/Qwen3-4B-4bit", None),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", None),  # two are called so
        ("fast", "own"),
        ("gone", None),
        ("gpt-5", "at/hand"),
        ("claude", None),
        ("", "at/hand"),
        (None, "at/hand"),
        (":latest", "at/hand"),
    ],
)
def test_a_name_means_one_model_or_none(written: str | None, meant: str | None) -> None:
    assert ModelNames(MODELS, ALIASES, lambda: "at/hand").find(written) == meant
