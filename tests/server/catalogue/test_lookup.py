import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from server.catalogue.lookup import InFolder, OnHub, aliases, look_up
from server.catalogue.names import ModelNotFoundError, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def disk(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelf with a model of someone's, and the hub's cache with three."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tiny_model, tmp_path / "shelf/someone/Own-4bit")
    for name in ("mlx--Tiny-4bit", "mlx--Twice-4bit", "other--Twice-4bit"):
        shutil.copytree(tiny_model, tmp_path / f"cache/models--{name}/snapshots/{COMMIT}")
    return tmp_path / "shelf"


def test_a_short_name_stands_for_a_repository(disk: Path) -> None:
    assert look_up("qwen3:4b") == OnHub("mlx-community/Qwen3-4B-4bit", None)
    assert look_up("qwen3.8:27b") == OnHub("mlx-community/Qwen3.8-27B-4bit", None)
    assert look_up("qwen3:4b@main") == OnHub("mlx-community/Qwen3-4B-4bit", "main")
    assert all(is_hub_id(repository) for repository in aliases().values())
    with pytest.raises(ModelNotFoundError, match=r"Ollama names models: .* knows qwen3:0\.6b, "):
        look_up("gemma3:4b")


def test_a_model_here_is_found_by_the_last_part_of_its_name(disk: Path) -> None:
    assert look_up("tiny-4bit") == OnHub("mlx/Tiny-4bit", None)
    own = InFolder("someone/Own-4bit", disk / "someone/Own-4bit")
    assert look_up("own-4bit", [disk]) == own
    assert look_up("someone/Own-4bit", [disk]) == own
    assert look_up("someone/Own-4bit") == OnHub("someone/Own-4bit", None)
    with pytest.raises(ModelNotFoundError, match=r"name mlx/Twice-4bit or other/Twice-4bit$"):
        look_up("Twice-4bit")
    with pytest.raises(ModelNotFoundError, match="it is not a hub id"):
        look_up("nosuch", [disk])


def test_a_model_that_cannot_be_served_does_not_hide_the_hubs(disk: Path) -> None:
    (disk / "someone/Own-4bit/model.safetensors").unlink()
    assert look_up("someone/Own-4bit", [disk]) == OnHub("someone/Own-4bit", None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("org/name@main", OnHub("org/name", "main")),
        ("org/name@refs/pr/1", OnHub("org/name", "refs/pr/1")),
        (f"org/name@{COMMIT}", OnHub("org/name", COMMIT)),
        ("org/name@", None),
        ("org/name@../x", None),
        ("org/name@a@b", None),
        ("./org/name@main", None),
    ],
)
def test_a_pin_stands_behind_the_name(name: str, place: OnHub | None, disk: Path) -> None:
    if place is None:
        with pytest.raises(ModelNotFoundError):
            look_up(name)
    else:
        assert look_up(name) == place
