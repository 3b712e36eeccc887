"""Tests that end a process, limit it or need a fresh one run in a program of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = 60


def run_program(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in the checkout; environment: variables that are set for it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=CHECKOUT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def output_of(text: str, **environment: str) -> str:
    """What a program that must end well printed."""
    done = run_program(text, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
