"""``make setup`` shows its progress: configs/setup/progress.py around stand-ins for pip."""

import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "configs/setup/progress.py"
PIP = """
    print("Collecting numpy==2.1 (from -r requirements.lock (line 1))")
    print("  Downloading numpy-2.1-cp311.whl (16.1 MB)")
    print("Collecting typer==0.29 (from -r requirements.lock (line 9))")
    print("Installing collected packages: numpy, typer")
"""
NINJA = """
    print("  [1/12] Building CXX object CMakeFiles/_ext.dir/csrc/core/heap_pool.cpp.o")
    print("  [12/12] Linking CXX shared module _ext.so")
"""


def arguments(folder: Path, program: str, *flags: str) -> list[str]:
    script = folder / "standin.py"
    script.write_text(textwrap.dedent(program))
    log = ["--log", str(folder / "log")]
    return [
        *(sys.executable, str(PROGRAM), *log, *flags, "packages, 0.5 GB", "--"),
        *(sys.executable, str(script)),
    ]


def at_a_terminal(command: list[str]) -> str:
    """Run a command at a terminal, and return its output."""
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdout=follower, stderr=follower) as process:
        os.close(follower)
        said = b""
        try:
            while more := os.read(leader, 4096):
                said += more
        except OSError:  # Linux's word for the end of it
            pass
        assert process.wait() == 0
    os.close(leader)
    return said.decode()


def test_each_package_is_named_at_a_terminal_and_they_are_counted(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("numpy==2.1 \\\n    --hash=sha256:00\ntyper==0.29\nother==1\n")
    said = at_a_terminal(arguments(tmp_path, PIP, "--lock", str(lock)))
    assert said.startswith("setup: packages, 0.5 GB\r\n")
    states = [re.sub(r"^ +\d+ s  ", "", state) for state in said.split("\r\x1b[K")[1:]]
    assert states == [
        "package 1 of about 3: numpy",
        "package 1 of about 3: numpy, 16.1 MB",
        "package 2 of about 3: typer",
        "installs 2 packages",
        "done\r\n",
    ]


def test_each_step_of_the_compiler_is_named_at_a_terminal(tmp_path: Path) -> None:
    said = at_a_terminal(arguments(tmp_path, NINJA))
    assert "s  compiles 1 of 12: heap_pool.cpp\r" in said
    assert "s  compiles 12 of 12: _ext.so\r" in said


def test_elsewhere_a_short_command_is_two_lines_and_its_log_has_the_rest(tmp_path: Path) -> None:
    done = subprocess.run(arguments(tmp_path, PIP), capture_output=True, text=True, check=True)
    assert re.fullmatch(r"setup: packages, 0.5 GB\n +\d+ s  done\n", done.stdout)
    assert "Downloading numpy" in (tmp_path / "log").read_text()


def test_a_failure_shows_the_end_of_the_output_and_keeps_the_exit_code(tmp_path: Path) -> None:
    program = """
        import sys
        for number in range(100):
            print(f"line {number}")
        print("error: no compiler", file=sys.stderr)
        sys.exit(7)
    """
    command = arguments(tmp_path, program)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert f"failed; it said at last (all of it: {tmp_path / 'log'}):" in done.stdout
    assert "error: no compiler" in done.stdout
    assert "line 99" in done.stdout
    assert "line 10\n" not in done.stdout
