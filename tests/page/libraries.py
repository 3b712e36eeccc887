"""Fetch the libraries of the page: ``python -m tests.page.libraries`` (needs npm).

``libraries.json`` is their lock: packages at exact versions with npm's own digests, and which of
their files the page has. To upgrade one, change its version, its folder and its digest there (``npm
view NAME@VERSION dist.integrity``), run this, and name the new folder where it is imported.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("libraries.json")
VENDORED = Path(__file__).parents[2] / "server" / "page" / "vendor"
FETCH_TIMEOUT_S = 300


def read_lock() -> list[dict[str, Any]]:
    """The packages, as the lock has them."""
    packages: list[dict[str, Any]] = json.loads(LOCK.read_text())["packages"]
    return packages


def main() -> int:
    """Write all files anew, and the digest of each to the lock. Raises ValueError for a package
    that is not the one of the lock, and what npm and the file system raise."""
    packages = read_lock()
    with tempfile.TemporaryDirectory() as fetched:
        contents = {
            f"{package['folder']}/{file['as']}": (file, content)
            for package in packages
            for file, content in _files(package, Path(fetched))
        }
    shutil.rmtree(VENDORED, ignore_errors=True)
    for name, (file, content) in contents.items():
        path = VENDORED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        file["sha256"] = hashlib.sha256(content).hexdigest()
    LOCK.write_text(json.dumps({"packages": packages}, indent=2) + "\n")
    print(f"{len(contents)} files, {sum(len(content) for _, content in contents.values())} bytes")
    return 0


def _files(package: dict[str, Any], folder: Path) -> list[tuple[dict[str, str], bytes]]:
    """Return the wanted files of a package: their entries of the lock, and their contents."""
    wanted = f"{package['name']}@{package['version']}"
    command = ("npm", "pack", "--silent", "--pack-destination", str(folder), wanted)
    done = subprocess.run(
        command, check=True, timeout=FETCH_TIMEOUT_S, stdout=subprocess.PIPE, text=True
    )
    archive = folder / done.stdout.split()[-1]
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package["integrity"]:
        raise ValueError(f"{wanted} is not what {LOCK.name} says: its digest is sha512-{digest}")
    with tarfile.open(archive) as packed:
        found = []
        for name, file in package["files"].items():
            member = packed.extractfile(f"package/{name}")
            assert member is not None, f"{wanted} has no file {name}"
            found.append((file, member.read()))
    return found


if __name__ == "__main__":
    sys.exit(main())
