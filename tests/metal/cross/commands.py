"""The commands with which CMake built the extension, to build something else in the same way."""

import json
import shlex
import shutil
import subprocess

from .wheel_build import Target

# A source that is compiled with all that the extension's sources see.
PATTERN = "csrc/ops/append.cpp"


def compiling(target: Target) -> list[str]:
    """How a source of the extension was compiled, without input and output."""
    database = json.loads((target.build_dir / "compile_commands.json").read_text())
    (entry,) = (entry for entry in database if entry["file"].endswith(f"/{PATTERN}"))
    words = shlex.split(entry["command"])
    return words[: words.index("-o")]


def linking(target: Target) -> list[str]:
    """How the extension was linked, without output."""
    ninja = shutil.which("ninja")
    assert ninja, "ninja is not on the path"
    command = [ninja, "-C", str(target.build_dir), "-t", "commands", target.extension.name]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = [word for word in shlex.split(listing.splitlines()[-1]) if word not in {":", "&&"}]
    output = words.index("-o")
    return words[:output] + words[output + 2 :]


def refusal(target: Target, command: list[str]) -> str:
    """What a command that failed in the build folder said; "" where it did not fail."""
    done = subprocess.run(
        command, cwd=target.build_dir, capture_output=True, text=True, check=False
    )
    return (done.stderr or "it failed without a word") if done.returncode else ""
