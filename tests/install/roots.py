"""Clean roots of Debian and Ubuntu, as debootstrap makes them, and the Python of each.

    python -m tests.install.roots PYTHON...

fetches the headers of these Pythons into build/install/headers, for wheels that are built without
that Python. Ubuntu's keys are on an Ubuntu; where they are not, debootstrap cannot check what it
fetches of an Ubuntu, and that is said. apt checks inside a root, with the root's own keys.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docker.steps import (
    Image,
    debian,
    in_namespaces,
    inside,
    machine_files,
    machine_variables,
    run,
)

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "install"
UBUNTU_KEYS = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
# Of debootstrap, for all Ubuntus since; it may be older than the newest of them.
UBUNTU_SCRIPT = "gutsy"
APT = "export DEBIAN_FRONTEND=noninteractive && apt-get update -q && apt-get install -qy"
UNPACK = (
    "apt-get update -q && rm -rf /tmp/headers && mkdir /tmp/headers && cd /tmp/headers && "
    "apt-get download -q {package} && dpkg-deb --extract *.deb ."
)


@dataclass(frozen=True, slots=True)
class Release:
    """A Debian or an Ubuntu. python: the version that is tried there; command: its name there."""

    name: str
    python: str
    command: str = "python3"
    is_ubuntu: bool = False

    @property
    def python_packages(self) -> str:
        return f"{self.command} {self.command}-venv"


# jammy is the oldest whose C library has what the wheels need; its other Python is too old.
RELEASES = {
    release.name: release
    for release in (
        Release("bookworm", "3.11"),
        Release("trixie", "3.13"),
        Release("jammy", "3.11", "python3.11", is_ubuntu=True),
        Release("noble", "3.12", is_ubuntu=True),
        Release("resolute", "3.14", is_ubuntu=True),
    )
}
# The release that has each Python's headers.
HEADERS_OF = {"3.11": "bookworm", "3.12": "noble", "3.13": "trixie", "3.14": "resolute"}
PYTHONS = tuple(HEADERS_OF)


def base_root(release: Release) -> Path:
    """Return the root of debootstrap, made once."""
    if not release.is_ubuntu:
        return debian(release.name)
    folder = BUILT / f"base-{release.name}"
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        keys = [] if UBUNTU_KEYS.is_file() else ["--no-check-gpg"]
        if keys:
            print(f"{release.name}: without {UBUNTU_KEYS.name}, nothing checks it", flush=True)
        options = ["--variant=minbase", "--components=main,universe", *keys]
        run(["debootstrap", *options, release.name, str(folder), "", UBUNTU_SCRIPT])
        # What an Ubuntu brought after it was out, jammy's newer Python among it.
        sources = folder / "etc/apt/sources.list"
        lines = sources.read_text()
        updates = lines.replace(f" {release.name} ", f" {release.name}-updates ")
        sources.write_text(lines + updates)
        (folder / "complete").touch()
    return folder


def fresh_root(release: Release, name: str) -> Image:
    """Copy the base, to be changed."""
    image = Image(BUILT / f"root-{name}")
    shutil.rmtree(image.folder, ignore_errors=True)
    image.folder.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "--archive", "--reflink=auto", str(base_root(release)), str(image.folder)])
    return image


def run_in(image: Image, command: str) -> None:
    """Run a shell's command in the root, with this machine's way to its registries."""
    with machine_files(image.folder):
        run(in_namespaces(image, ["/bin/sh", "-c", command]), machine_variables(image))


def headers(python: str) -> Path:
    """The headers of that Python, as its Debian or Ubuntu has them; fetched once.

    A distribution keeps what differs from one processor to the next apart. Of that the headers for
    x86_64 are taken: macOS and arm64 differ from it in nothing that an extension sees.
    """
    folder = BUILT / "headers" / python
    if not (folder / "complete").is_file():
        image = Image(base_root(RELEASES[HEADERS_OF[python]]))
        run_in(image, UNPACK.format(package=f"libpython{python}-dev"))
        unpacked = inside(image, "/tmp/headers")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(unpacked / f"usr/include/python{python}", folder)
        machine = unpacked / f"usr/include/x86_64-linux-gnu/python{python}/pyconfig.h"
        shutil.copyfile(machine, folder / "pyconfig.h")
        shutil.rmtree(unpacked)
        (folder / "complete").touch()
    return folder


def tracked(*paths: str) -> list[str]:
    """Return the files of the checkout below these paths, with new ones."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in found.stdout.splitlines() if (ROOT / name).is_file()]


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(f"{headers(asked).relative_to(ROOT)}")
