"""The notes of a release, and the formula that installs it."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.install.release import (
    BUILD_ONLY,
    MACS,
    NOT_YET,
    ROOT,
    formula,
    notes,
    sha256,
    version,
)
from tests.install.roots import HEADERS_OF, PYTHONS, RELEASES
from tests.install.wheels import SOURCES

CHANGES = """\
# Changes

## 0.2.0, not released yet

* Not yet.

## 0.1.0, 2026-12-01

* First.
* Second.
"""


def test_the_notes_of_a_release_are_its_section_of_the_changes() -> None:
    assert notes(CHANGES, "0.1.0", "v0.1.0") == "* First.\n* Second.\n"
    assert notes(CHANGES, "0.2.0") == "* Not yet.\n"


def test_the_changes_have_a_section_of_this_version() -> None:
    assert notes((ROOT / "CHANGELOG.md").read_text(), version()).startswith("* ")


@pytest.mark.parametrize(
    ("of", "tag", "reason"),
    [
        ("0.1.0", "v0.1.1", "the tag is v0.1.1"),
        ("0.2.0", "v0.2.0", NOT_YET),
        ("0.3.0", "", "no section"),
    ],
)
def test_a_tag_that_is_wrong_or_too_early_is_refused(of: str, tag: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        notes(CHANGES, of, tag)


def test_the_formula_names_every_file_with_its_hash(tmp_path: Path) -> None:
    names = [f"quire-{version()}.tar.gz"]
    names += [f"quire-{version()}-cp313-cp313-{platform}.whl" for platform in MACS]
    for name in names:
        (tmp_path / name).write_text(name)
    text = formula(tmp_path, "https://files.example/v1", "https://quire.example")
    for name in names:
        file = re.escape(f'url "https://files.example/v1/{name}"')
        hash_of = sha256(tmp_path / name)
        assert re.search(rf'{file}(, using: :nounzip)?\n *sha256 "{hash_of}"', text), name
    assert 'homepage "https://quire.example"' in text
    assert "{" not in re.sub(r"#\{\w+\}|\{ system .* \}", "", text)


def test_what_is_only_for_builds_is_in_the_lock_that_the_formula_installs() -> None:
    lock = (ROOT / "configs/locks/requirements.lock").read_text()
    for package in BUILD_ONLY.split():
        assert f"\n{package}==" in "\n" + lock


def test_a_wheel_is_built_from_all_of_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["scikit-build"]["wheel"]["packages"]) < set(SOURCES)


def test_every_python_that_quire_names_has_a_root_to_be_tried_in() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert tuple(named) == PYTHONS
    assert {release.python for release in RELEASES.values()} == set(PYTHONS)
    assert all(RELEASES[name].python == python for python, name in HEADERS_OF.items())


def test_the_workflow_builds_and_tries_every_python() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert f'PYTHONS: "{" ".join(PYTHONS)}"' in workflow
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert tuple(re.findall(r"[\d.]+", matrix)) == PYTHONS
    (roots,) = re.findall(r'ROOTS="(.*)"', workflow)
    assert set(roots.split()) == set(RELEASES)
