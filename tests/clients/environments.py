"""Environments of the clients, one each, so that their pins do not fight.

A folder beside this file is a client's: with ``requirements.lock`` one of Python's, with
``package-lock.json`` one of Node's. What it needs is installed below ``build/clients``, from its
lock alone, and again only when that has changed. uv and Node come from PyPI, by the lock of the
folder ``tools``. ``python -m tests.clients.environments`` resolves all locks again.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "clients"
TOOLS = BUILT / "tools"
PYTHON_LOCK = "requirements.lock"
NODE_LOCK = "package-lock.json"
OLDEST_PYTHON = "3.11"
INSTALL_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A library that applications speak to servers with."""

    folder: Path
    """Its lock and its checks."""

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.folder.name

    @property
    def built(self) -> Path:
        """Where its environment is."""
        return BUILT / self.name

    @property
    def lock(self) -> Path:
        """Versions and hashes of all that it needs."""
        python = self.folder / PYTHON_LOCK
        return python if python.is_file() else self.folder / NODE_LOCK

    @property
    def is_python(self) -> bool:
        """Or else of Node."""
        return self.lock.name == PYTHON_LOCK

    def command(self) -> list[str]:
        """Runs all its checks."""
        if not self.is_python:
            return [str(TOOLS / "bin" / "node"), "--test", "--test-reporter=tap", "check.mjs"]
        # Our own settings are for our own tests.
        options = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
        return [str(self.built / "bin" / "python"), "-m", "pytest", *options, "check.py"]

    def install(self) -> None:
        """Makes its environment, unless it is there. Raises CalledProcessError."""
        stamp = self.built / "installed"
        if stamp.is_file() and stamp.read_bytes() == self.lock.read_bytes():
            return
        shutil.rmtree(self.built, ignore_errors=True)
        self.built.mkdir(parents=True)
        if self.is_python:
            self._install_python()
        else:
            self._install_node()
        shutil.copy(self.lock, stamp)

    def _install_python(self) -> None:
        uv, python = str(TOOLS / "bin" / "uv"), str(self.built / "bin" / "python")
        run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, self.built])
        install = [uv, "pip", "install", "--quiet", "--python", python, "--require-hashes"]
        run([*install, "-r", self.lock])

    def _install_node(self) -> None:
        for name in ("package.json", NODE_LOCK):
            shutil.copy(self.folder / name, self.built)
        npm = [str(TOOLS / "bin" / "npm"), "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        run([*npm, "--loglevel=error"], self.built)

    def workplace(self) -> Path:
        """Where its checks run: away from our own packages, which it has not."""
        check = self.folder / ("check.py" if self.is_python else "check.mjs")
        shutil.copy(check, self.built)
        return self.built


def all_clients() -> list[Client]:
    """In the order of their names."""
    folders = sorted(HERE.iterdir())
    found = [Client(folder) for folder in folders if folder.is_dir() and folder.name != TOOLS.name]
    return [client for client in found if client.lock.is_file()]


def tools() -> Client:
    """uv and Node, as if they were a client."""
    return Client(HERE / TOOLS.name)


def install_tools() -> None:
    """From PyPI, by pip. Raises CalledProcessError."""
    lock, stamp = tools().lock, TOOLS / "installed"
    if stamp.is_file() and stamp.read_bytes() == lock.read_bytes():
        return
    shutil.rmtree(TOOLS, ignore_errors=True)
    run([sys.executable, "-m", "venv", TOOLS])
    pip = [str(TOOLS / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--require-hashes", "-r", lock])
    shutil.copy(lock, stamp)


def environment(**more: str) -> dict[str, str]:
    """For what runs here: Node is found, and no key of a person's own is sent."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    path = f"{TOOLS / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": path, "NO_PROXY": "127.0.0.1"} | more


def run(command: Sequence[str | Path], folder: Path = ROOT) -> None:
    """Raises CalledProcessError."""
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=INSTALL_TIMEOUT_S)


def write_lock(client: Client) -> None:
    """Write the client's lock: versions and hashes of its packages, and no address."""
    if client.is_python:
        compile_ = [str(TOOLS / "bin" / "uv"), "pip", "compile", "requirements.in", "--upgrade"]
        options = ["--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes", "--quiet"]
        tidy = ["--no-emit-index-url", "--no-header", "--no-annotate", "-o", PYTHON_LOCK]
        run([*compile_, *options, *tidy], client.folder)
        return
    (client.folder / NODE_LOCK).unlink(missing_ok=True)
    npm = [str(TOOLS / "bin" / "npm"), "install", "--package-lock-only", "--no-audit", "--no-fund"]
    run([*npm, "--omit-lockfile-registry-resolved"], client.folder)
    path = client.folder / NODE_LOCK
    packages = json.loads(path.read_text())
    path.write_text(json.dumps(without_addresses(packages), indent=2) + "\n")


def without_addresses(lock: dict[str, Any]) -> dict[str, Any]:
    """Drop from npm's lock the pages on which authors ask for money."""
    for package in lock["packages"].values():
        package.pop("funding", None)
    return lock


def main() -> None:
    install_tools()
    for client in [tools(), *all_clients()]:
        write_lock(client)


if __name__ == "__main__":
    main()
