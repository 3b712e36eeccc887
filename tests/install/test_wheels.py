"""What is asked of a wheel, on wheels that are made up: each with one thing wrong."""

import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.install.roots import ROOT
from tests.install.wheels import SOURCES
from tests.metal.cross import wheel_checks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXPECTED = wheel_checks.Expected(
    "3.12", "manylinux_2_35_x86_64", ".cpython-312-x86_64-linux-gnu.so"
)
MODULE = f"metal_ext/_ext{EXPECTED.suffix}"
INFO = "quire-0.1.0.dist-info"


def wheel(folder: Path, **changes: str | None) -> Path:
    """A wheel with all that it must have, but for these contents by name; None leaves one out."""
    requires = "".join(f"Requires-Dist: {line}\n" for line in PROJECT["project"]["dependencies"])
    metadata = (
        "Metadata-Version: 2.4\nName: quire\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
    )
    files: dict[str, str | None] = dict.fromkeys([*wheel_checks.sources(PROJECT), MODULE], "")
    files |= {
        f"{INFO}/METADATA": metadata + requires,
        f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {EXPECTED.tag}\n",
        f"{INFO}/entry_points.txt": "[console_scripts]\nquire = server.cli:main\n",
        f"{INFO}/licenses/LICENSE": "",
    }
    files |= changes
    path = folder / f"quire-0.1.0-{EXPECTED.tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        present = {name: content for name, content in files.items() if content is not None}
        for name, content in present.items():
            archive.writestr(name, content)
        record = "".join(f"{name},,\n" for name in [*present, f"{INFO}/RECORD"])
        archive.writestr(f"{INFO}/RECORD", record)
    return path


def test_a_wheel_as_it_should_be_passes(tmp_path: Path) -> None:
    assert wheel_checks.complaints(wheel(tmp_path), EXPECTED) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"server/configs/demo/model/model.safetensors": None}, "model.safetensors is missing"),
        ({"server/configs/quire.toml": None}, "quire.toml is missing"),
        ({"quire.libs/libmlx.so": ""}, "libmlx.so has no business in it"),
        ({f"{INFO}/licenses/LICENSE": None}, "its licence is missing"),
        ({f"{INFO}/WHEEL": "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"}, "its tags are"),
        ({f"{INFO}/entry_points.txt": "[console_scripts]\nq = a:b\n"}, "its commands are"),
        ({f"{INFO}/METADATA": "Name: quire\nVersion: 0.1.0\n"}, "does not require mlx==0.32.4"),
    ],
)
def test_a_wheel_with_one_thing_wrong_is_named_with_it(
    tmp_path: Path, changes: dict[str, str | None], complaint: str
) -> None:
    found = wheel_checks.complaints(wheel(tmp_path, **changes), EXPECTED)
    assert any(complaint in sentence for sentence in found), found


def test_what_a_wheel_is_built_from_is_all_of_its_packages() -> None:
    assert set(PROJECT["tool"]["scikit-build"]["wheel"]["packages"]) < set(SOURCES)
