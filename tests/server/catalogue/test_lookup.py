import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from server.catalogue.local_models import Place
from server.catalogue.lookup import aliases, look_up
from server.catalogue.names import ModelNotFoundError, is_hub_id, nearest
from server.shipped import DEMO_MODEL, shipped

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
    assert look_up("qwen3:4b") == Place("mlx-community/Qwen3-4B-4bit")
    assert look_up("qwen3.8:27b") == Place("mlx-community/Qwen3.8-27B-4bit")
    assert look_up("qwen3:4b@main") == Place("mlx-community/Qwen3-4B-4bit", None, "main")
    assert all(is_hub_id(repository) for repository in aliases().values())
    with pytest.raises(ModelNotFoundError, match=r"Ollama names models: .* knows qwen3:0\.6b, "):
        look_up("gemma3:4b")


def test_a_model_here_is_found_by_the_last_part_of_its_name(disk: Path) -> None:
    assert look_up("tiny-4bit") == Place("mlx/Tiny-4bit")
    own = Place("someone/Own-4bit", disk / "someone/Own-4bit")
    assert look_up("own-4bit", [disk]) == own
    assert look_up("someone/Own-4bit", [disk]) == own
    assert look_up("someone/Own-4bit") == Place("someone/Own-4bit")
    with pytest.raises(ModelNotFoundError, match=r"name mlx/Twice-4bit or other/Twice-4bit$"):
        look_up("Twice-4bit")
    with pytest.raises(ModelNotFoundError, match="it is not a hub id"):
        look_up("nosuch", [disk])


def test_a_model_that_cannot_be_served_does_not_hide_the_hubs(disk: Path) -> None:
    (disk / "someone/Own-4bit/model.safetensors").unlink()
    assert look_up("someone/Own-4bit", [disk]) == Place("someone/Own-4bit")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("QWEN3:4B", Place("mlx-community/Qwen3-4B-4bit")),
        ("MLX/tiny-4BIT", Place("mlx/Tiny-4bit")),
        ("TINY-4bit", Place("mlx/Tiny-4bit")),
        ("tiny-4bit@main", Place("mlx/Tiny-4bit", None, "main")),
        ("Mlx/Tiny-4bit@v1", Place("mlx/Tiny-4bit", None, "v1")),
        ("Org/Unknown", Place("Org/Unknown")),
        ("Demo", Place("quire-demo", shipped(DEMO_MODEL).resolve())),
        ("Someone/OWN-4bit", Place("someone/Own-4bit", Path("shelf/someone/Own-4bit"))),
        ("someone/own-4bit@main", Place("someone/own-4bit", None, "main")),
        ("mlx/small-4bit", Place("mlx/small-4bit")),
        ("mlx/Small-4bit", Place("mlx/Small-4bit")),
    ],
)
def test_case_matters_only_between_two_that_differ_in_nothing_else(
    name: str, place: Place, disk: Path
) -> None:
    for spelling in ("small", "Small"):
        shutil.copytree(
            disk.parent / f"cache/models--mlx--Tiny-4bit/snapshots/{COMMIT}",
            disk.parent / f"cache/models--mlx--{spelling}-4bit/snapshots/{COMMIT}",
        )
    folder = place.folder and place.folder.absolute()
    assert look_up(name, [Path("shelf")]) == place._replace(folder=folder)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tiny-4bt", "mlx/Tiny-4bit"),
        ("Own4bit", "someone/Own-4bit"),
        ("qwen3:4", "qwen3:4b"),
        ("qwen38:27b", "qwen3.8:27b"),
        ("qwen3-30b-a3b", "mlx-community/Qwen3-30B-A3B-4bit"),
        ("twice4bit", "mlx/Twice-4bit"),
        ("zzz", None),
        ("x" * 250, None),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, near: str | None, disk: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        look_up(name, [disk])
    assert str(caught.value).endswith(f"; did you mean {near}?") is (near is not None)


def test_lm_studios_copy_is_taken_where_none_better_is_here(
    disk: Path, lm_studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mlx-community/Tiny-4bit"
    own = Place(name, lm_studio / name)
    for written in (name, name.upper(), "Tiny-4bit"):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk / "no cache"))
        assert look_up(written) == own
    cached = disk / "no cache/models--mlx-community--Tiny-4bit/snapshots" / COMMIT
    cached.mkdir(parents=True)
    assert look_up(name) == own, "what is in the hub's cache is not complete"
    shutil.copytree(lm_studio / name, cached, dirs_exist_ok=True)
    assert look_up(name) == Place(name)
    assert look_up(f"{name}@main") == Place(name, None, "main")
    (cached / "model.safetensors").unlink()
    (lm_studio / name / "model.safetensors").unlink()
    assert look_up(name) == Place(name), "where it can be completed"
    assert look_up("bartowski/tiny-gguf") == Place("bartowski/tiny-gguf")
    assert look_up("tiny-gguf") == Place("bartowski/Tiny-GGUF", lm_studio / "bartowski/Tiny-GGUF")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("org/name@main", Place("org/name", None, "main")),
        ("org/name@refs/pr/1", Place("org/name", None, "refs/pr/1")),
        (f"org/name@{COMMIT}", Place("org/name", None, COMMIT)),
        ("org/name@", None),
        ("org/name@../x", None),
        ("org/name@a@b", None),
        ("./org/name@main", None),
    ],
)
def test_a_pin_stands_behind_the_name(name: str, place: Place | None, disk: Path) -> None:
    if place is None:
        with pytest.raises(ModelNotFoundError):
            look_up(name)
    else:
        assert look_up(name) == place


@pytest.mark.parametrize("name", ["qwen3", "qwen3:", "org/b", "qwen2.5", "qwen3:9b", "qwen3-x"])
def test_the_nearest_of_equally_near_names_is_the_same_in_any_order(name: str) -> None:
    known = ["qwen3:8b", "qwen3:4b", "qwen2.5:7b", "qwen2.5:3b", "org/b2", "org/b1", "other/b1"]
    assert nearest(name, known) == nearest(name, known[::-1]) is not None
