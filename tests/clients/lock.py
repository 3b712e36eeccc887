"""Resolves the clients' locks again: ``python -m tests.clients.lock``."""

import json
from typing import Any

from tests.clients.environments import (
    NODE_LOCK,
    PYTHON_LOCK,
    TOOLS,
    Client,
    all_clients,
    install_tools,
    run,
    tools,
)

OLDEST_PYTHON = "3.11"


def lock(client: Client) -> None:
    """Versions and hashes of what it needs, and no address."""
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
    found = json.loads(path.read_text())
    path.write_text(json.dumps(without_addresses(found), indent=2) + "\n")


def without_addresses(found: dict[str, Any]) -> dict[str, Any]:
    """A lock of npm's without the pages where its authors ask for money."""
    for package in found["packages"].values():
        package.pop("funding", None)
    return found


def main() -> None:
    """All of them, and that of uv and Node."""
    install_tools()
    for client in [tools(), *all_clients()]:
        lock(client)


if __name__ == "__main__":
    main()
