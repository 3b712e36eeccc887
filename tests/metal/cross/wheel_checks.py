"""What must hold of a wheel, for a Mac or for Linux."""

import configparser
import dataclasses
import email
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Of the packages' folders, what only a build or a reader needs.
BUILD_ONLY = {".cpp", ".h", ".c", ".metal", ".cmake", ".md"}
BUILD_FILES = {"CMakeLists.txt"}
# What comes along in the server's package.
SHIPPED = ("configs/quire.toml", "configs/aliases.toml", "configs/demo/model")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a wheel is for: a Python such as "3.11", a platform's tag, and the suffix that modules
    of both have."""

    python: str
    platform: str
    suffix: str

    @property
    def tag(self) -> str:
        """All of it, as a wheel says it."""
        version = "cp" + self.python.replace(".", "")
        return f"{version}-{version}-{self.platform}"


def complaints(wheel: Path, of: Expected) -> list[str]:
    """Everything that is wrong with the wheel, in sentences."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        tags = email.message_from_bytes(archive.read(f"{folder}/WHEEL")).get_all("Tag", [])
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{folder}/entry_points.txt").decode())
    found = []
    expected = sources(project) | {f"metal_ext/_ext{of.suffix}"}
    present = {name for name in names if not name.startswith(folder)}
    found += [f"{name} is missing" for name in sorted(expected - present)]
    found += [f"{name} has no business in it" for name in sorted(present - expected)]
    if tags != [of.tag]:
        found.append(f"its tags are {tags}, not {of.tag} alone")
    if f"{folder}/licenses/LICENSE" not in names or metadata["License-Expression"] != "Apache-2.0":
        found.append("its licence is missing")
    if dict(scripts["console_scripts"]) != project["project"]["scripts"]:
        found.append(f"its commands are {dict(scripts['console_scripts'])}")
    required = {_plain(line) for line in metadata.get_all("Requires-Dist", [])}
    found += [
        f"it does not require {line}"
        for line in project["project"]["dependencies"]
        if _plain(line) not in required
    ]
    return found or _installation(wheel, of)


def sources(project: dict[str, dict[str, dict[str, dict[str, list[str]]]]]) -> set[str]:
    """What git has of the packages, but for what only a build needs, and what comes along; new
    files count too."""
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--"]
    listing = subprocess.run(
        [*listed, *packages, *SHIPPED],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {
        name if name.split("/")[0] in packages else f"server/{name}"
        for name in listing.stdout.splitlines()
        if Path(name).suffix not in BUILD_ONLY and Path(name).name not in BUILD_FILES
    }


def _plain(requirement: str) -> str:
    return requirement.replace(" ", "").replace('"', "'").lower()


def _installation(wheel: Path, of: Expected) -> list[str]:
    """pip, asked to install for that system, has the last word on tags and contents."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
             "--no-index", "--only-binary=:all:", "--platform", of.platform,
             "--python-version", of.python, "--implementation", "cp",
             "--target", folder, str(wheel)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return [f"pip refuses it: {done.stderr.strip()}"]
        if not (Path(folder) / f"metal_ext/_ext{of.suffix}").is_file():
            return ["pip installed it without its extension"]
    return []
