"""Installs quire's wheel where there is Python and no compiler, and asks the demo model.

    python -m tests.install [bookworm noble ...]

needs root, debootstrap, unshare, nsenter and ip. The wheel is the one for that root's Python in
build/wheels; where it is not there, it is built first. Its dependencies come from the registry, as
for a user; what is served then has no network.
"""

import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.docker.steps import Image, child_of, compilers_in, in_namespaces, inside
from tests.install import wheels
from tests.install.roots import APT, RELEASES, ROOT, Release, fresh_root, run_in

PYTHON = f"{APT} --no-install-recommends {{packages}}"
INSTALL = "{python} -m venv /opt/quire && /opt/quire/bin/pip install -q /tmp/{wheel}"
VERSION = "/opt/quire/bin/quire --version"
ANSWER_LIMIT_S = 60.0
STOP_TIMEOUT_S = 40
PAUSE_S = 0.2


def wheel_for(release: Release) -> Path:
    """Return the wheel for that root's Python, built if it is not there."""
    version = "cp" + release.python.replace(".", "")
    machine = platform.machine()
    found = sorted(wheels.WHEELS.glob(f"*-{version}-{version}-manylinux*_{machine}.whl"))
    assert len(found) <= 1, f"which of {[wheel.name for wheel in found]}?"
    return found[0] if found else wheels.build(wheels.builder(), release.python, machine)


def install(wheel: Path, release: Release) -> Image:
    """Make a root with Python, and the wheel in an environment of its own."""
    image = fresh_root(release, release.name)
    shutil.copy(wheel, inside(image, "/tmp"))
    for what, command in (
        (f"Python {release.python}", PYTHON.format(packages=release.python_packages)),
        (wheel.name, INSTALL.format(python=release.command, wheel=wheel.name)),
    ):
        begun = time.monotonic()
        run_in(image, command)
        print(
            f"{time.monotonic() - begun:6.1f} s  {what} is installed on {release.name}", flush=True
        )
    assert not (left := compilers_in(image)), f"the root has {left}"
    run_in(image, VERSION)
    return image


def serve_demo(image: Image) -> None:
    """Start ``quire serve demo`` without a network, ask it and end it. Raises AssertionError."""
    begun = time.monotonic()
    variables = image.environment | {"HOME": "/tmp"}
    image.user = "65534:65534"
    command = ["/opt/quire/bin/quire", "serve", "demo"]
    spaces = in_namespaces(image, command, offline=True)
    outer = subprocess.Popen(spaces, env=variables)
    try:
        inner = child_of(outer)
        enter = ["nsenter", f"--target={inner}", "--net", sys.executable]
        ask = [*enter, "-m", "tests.docker.steps", "ask"]
        while True:
            assert outer.poll() is None, f"it ended with {outer.returncode}"
            answer = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT)
            seconds = time.monotonic() - begun
            if answer.returncode == 0:
                break
            assert seconds < ANSWER_LIMIT_S, answer.stderr
            time.sleep(PAUSE_S)
        print(answer.stdout.strip())
        print(f"{seconds:6.1f} s  from its start to its answer", flush=True)
        subprocess.run(["kill", str(inner)], check=True)
        assert outer.wait(STOP_TIMEOUT_S) == 0, outer.returncode
    finally:
        outer.kill()
        outer.wait(STOP_TIMEOUT_S)


def main() -> int:
    names = sys.argv[1:] or ["bookworm"]
    for name in names:
        release = RELEASES[name]
        image = install(wheel_for(release), release)
        serve_demo(image)
        shutil.rmtree(image.folder)
    print(f"{len(names)} passed, 0 failed  # wheels without a compiler, on {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
