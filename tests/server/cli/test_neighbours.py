"""What else is installed under quire's names is said at start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import serve
from server.cli.serve import neighbours
from tests.server.commands import Run

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package's record of its files where Python looks for installed ones."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, *files: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "RECORD").write_text("".join(f"{file},sha256=0,1\n" for file in files))

    return install


def test_nothing_is_said_where_quire_is_alone(install: Install) -> None:
    install("quire", "server/__init__.py", "engine/__init__.py")
    install("game-engine", "game/engine/__init__.py", "observer/server.py", "servers/a.py")
    assert neighbours() is None


def test_every_package_of_the_same_name_is_named_with_whose_it_is(install: Install) -> None:
    install("web-server", "server/__init__.py", "server/app.py")
    install("another", "other.py", "server.py", "engine/__init__.py")
    said = neighbours()
    assert said is not None
    assert "`engine` of another" in said
    assert "`server` of " in said
    assert {"web-server", "another"} <= set(said.replace(",", "").split())
    assert "install quire where it is alone" in said


@pytest.mark.parametrize("models", [["none"], ["none", "nor"]])
def test_the_start_of_a_server_says_so(
    install: Install,
    quire: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: list[str],
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(serve.log, "warning", warnings.append)
    install("web-server", "server/__init__.py")
    assert quire("serve", *(tmp_path / name for name in models)).exit_code == 3
    assert warnings == [neighbours()]
