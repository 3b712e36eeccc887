"""Prints what CHANGELOG.md says of a version, as the text of its release.

    python -m tests.install.release_notes [v0.1.0]

A version that is named, as a tag is, must be pyproject.toml's, and its section must not say that it
is not released yet: with it, a tag that was set too early is refused.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_YET = "not released yet"
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+)(?:, (?P<when>.+))?$", re.MULTILINE)


def notes(changes: str, version: str, tag: str = "") -> str:
    """The section of a version. Raises ValueError where there is none, or it cannot be released."""
    if tag and tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml's version {version}")
    headings = list(HEADING.finditer(changes))
    heading = next((found for found in headings if found["version"] == version), None)
    if heading is None:
        raise ValueError(f"CHANGELOG.md has no section of {version}")
    if tag and heading["when"] == NOT_YET:
        raise ValueError(f"CHANGELOG.md says of {version} that it is {NOT_YET}")
    following = [found.start() for found in headings if found.start() > heading.end()]
    return changes[heading.end() : min(following, default=len(changes))].strip() + "\n"


def version() -> str:
    """The version of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def main() -> int:
    """The exit code."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        print(notes(changes, version(), *sys.argv[1:]), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
