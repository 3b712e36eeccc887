import json
from pathlib import Path
from typing import Any

import pytest

from server.catalogue.lm_studio import is_below, lm_studio_folders
from server.catalogue.local_models import local_models


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "models"),
    [
        (None, "", ".cache/lm-studio/models"),
        (".lmstudio/settings.json", {"downloadsFolder": "{home}/shelf"}, "shelf"),
        (".lmstudio/settings.json", {"downloadsFolder": "~/shelf"}, "shelf"),
        (".lmstudio/settings.json", {"downloadsFolder": "../shelf"}, "shelf"),
        (".cache/lm-studio/settings.json", {"downloadsFolder": "{home}/shelf"}, "shelf"),
        (".lmstudio-home-pointer", "{home}/studio\n", "studio/models"),
        (".lmstudio-home-pointer", "studio", "studio/models"),
    ],
)
def test_lm_studios_models_are_found_where_it_has_put_them(
    file: str | None, text: Any, models: str, lm_studio: Path
) -> None:
    home = lm_studio.parents[1]
    (home / models).mkdir(parents=True)
    if file is not None:
        text = text if isinstance(text, str) else json.dumps(text)
        put(home / file, text.replace("{home}", str(home)))
    assert set(lm_studio_folders()) == {lm_studio, home / models}
    assert is_below(home / models / "org/name", lm_studio_folders())
    assert not is_below(home / "models/org/name", lm_studio_folders())


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("settings.json", "{"),
        ("settings.json", "[]"),
        ("settings.json", '{"downloadsFolder": 7}'),
        ("settings.json", '{"downloadsFolder": ""}'),
        ("settings.json", '{"downloadsFolder": "/no/such"}'),
        ("settings.json", '{"downloadsFolder": "~nobody-is-so/x"}'),
        ("settings.json", '{"downloadsFolder": "a\\u0000b"}'),
        ("settings.json", json.dumps({"downloadsFolder": "x" * 5000})),
        ("../.lmstudio-home-pointer", ""),
        ("../.lmstudio-home-pointer", "\n"),
        ("../.lmstudio-home-pointer", "/no/such"),
    ],
)
def test_settings_that_name_no_folder_leave_the_usual_one(
    file: str, text: str, lm_studio: Path
) -> None:
    put(lm_studio.parent / file, text)
    (lm_studio.parents[1] / "models").mkdir()
    assert lm_studio_folders() == (lm_studio,)


def test_a_variable_names_lm_studios_home_or_none(
    lm_studio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other/models").mkdir(parents=True)
    monkeypatch.setenv("LMSTUDIO_HOME", str(tmp_path / "other"))
    assert lm_studio_folders() == (tmp_path / "other/models",)
    monkeypatch.setenv("LMSTUDIO_HOME", "")
    assert lm_studio_folders() == ()
    monkeypatch.delenv("LMSTUDIO_HOME")

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert lm_studio_folders() == ()


def test_of_its_models_each_is_listed_once_and_gguf_with_its_reason(lm_studio: Path) -> None:
    (lm_studio / "stray.gguf").write_bytes(b"GGUF")
    (lm_studio.parents[1] / ".cache").mkdir()
    (lm_studio.parents[1] / ".cache/lm-studio").symlink_to(lm_studio.parent)
    gguf, tiny, other = local_models([])
    assert other.problem == gguf.problem
    assert (gguf.name, gguf.size_bytes, gguf.quantization) == ("bartowski/Tiny-GGUF", 40, "gguf")
    assert "this is GGUF, and quire reads safetensors" in str(gguf.problem)
    assert (tiny.name, tiny.problem, tiny.revision) == ("mlx-community/Tiny-4bit", None, None)
    assert local_models([], hub=False) == ()
