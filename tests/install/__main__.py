"""Installs quire's wheel where there is Python and no compiler, and asks the demo model.

``python -m tests.install`` needs root, debootstrap, unshare, nsenter and ip. The wheel is built
from this checkout, for this Python; the root is a Debian whose own Python is of the same version.
Its dependencies come from the registry, as for a user; what is served then has no network.
"""

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from tests.docker.steps import (
    Image,
    child_of,
    compilers_in,
    debian,
    in_namespaces,
    inside,
    machine_files,
    machine_variables,
    run,
)

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "install"
# The Debian whose Python is of that version.
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
MUST_HAVE = ("server/configs/quire.toml", "server/configs/demo/model/model.safetensors")
PYTHON = "apt-get update -q && apt-get install -qy --no-install-recommends python3 python3-venv"
INSTALL = "python3 -m venv /opt/quire && /opt/quire/bin/pip install -q /tmp/{wheel}"
ANSWER_LIMIT_S = 60.0
STOP_TIMEOUT_S = 40
PAUSE_S = 0.2


def build_wheel() -> Path:
    """The wheel of this checkout, with all that it must have. Raises AssertionError."""
    shutil.rmtree(BUILT / "wheel", ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-build-isolation", f"--wheel-dir={BUILT / 'wheel'}", str(ROOT)])
    (wheel,) = (BUILT / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    missing = [name for name in MUST_HAVE if name not in names]
    assert not missing, f"{wheel.name} lacks {missing}"
    assert any(name.endswith("/licenses/LICENSE") for name in names), f"{wheel.name}: no licence"
    assert "License-Expression: Apache-2.0" in described
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
    return wheel


def install(wheel: Path, release: str) -> Image:
    """A root of that Debian with Python, and the wheel in an environment of its own."""
    image = Image(BUILT / f"root-{release}")
    shutil.rmtree(image.folder, ignore_errors=True)
    image.folder.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "--archive", "--reflink=auto", str(debian(release)), str(image.folder)])
    shutil.copy(wheel, inside(image, "/tmp"))
    for what, command in (("Python", PYTHON), ("quire", INSTALL.format(wheel=wheel.name))):
        begun = time.monotonic()
        with machine_files(image.folder):
            run(in_namespaces(image, ["/bin/sh", "-c", command]), machine_variables(image))
        print(f"{time.monotonic() - begun:6.1f} s  {what} is installed on {release}", flush=True)
    assert not (left := compilers_in(image)), f"the root has {left}"
    return image


def serve_demo(image: Image) -> None:
    """Starts ``quire serve demo`` without a network, asks it and ends it. Raises AssertionError."""
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
        print(f"{answer.stdout.strip()}\nanswered {seconds:.1f} s after its start", flush=True)
        subprocess.run(["kill", str(inner)], check=True)
        assert outer.wait(STOP_TIMEOUT_S) == 0, outer.returncode
    finally:
        outer.kill()
        outer.wait(STOP_TIMEOUT_S)


def main() -> int:
    """The wheel, a root, an answer."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if mine not in RELEASES:
        print(f"no Debian here has Python {mine}: the wheel of this Python is not tried")
        return 1
    image = install(build_wheel(), RELEASES[mine])
    serve_demo(image)
    shutil.rmtree(image.folder)
    print("1 passed, 0 failed  # the wheel in a root without a compiler")
    return 0


if __name__ == "__main__":
    sys.exit(main())
