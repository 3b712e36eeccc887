"""quire's own tests of pages, on a Mac: in pages of 16 KiB, with a GPU for MLX's default device."""

import re
import subprocess
from pathlib import Path

from tests.metal.darwin.macs import MACS
from tests.metal.darwin.product import ROOT, command

NOT_HERE = (
    "tests/metal_ext/test_loading.py",  # it replaces the extension that is installed
    # Arithmetic on a CPU, which no page and no system changes; here it is compiled for Linux's.
    *(f"tests/metal_ext/test_{name}.py" for name in ("attention", "choose", "experts", "linear")),
)
FEWEST_PASSED = 1000


def test_tests_of_pages_pass_or_say_why_not(figures: Path, report: list[str]) -> None:
    mac = MACS[1]
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    options += ["-o", "pythonpath=", "-p", "no:cacheprovider", "--tb=line", "-rN"]
    options += ["-p", "tests.metal.darwin.translated_tests"]
    options += [f"--ignore={ROOT / name}" for name in NOT_HERE]
    (wanted,) = re.findall(r"^MAC_TESTS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options += [word.replace("tests/", f"{ROOT / 'tests'}/") for word in wanted.split()]
    done = subprocess.run(
        [
            *command(mac, mac.told(figures), "python"),
            *("-m", "pytest", *options),
        ],
        cwd=figures,
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [line for line in done.stdout.splitlines() if line.startswith("E ")]
    assert done.returncode == 0, "\n".join([*wrong[:5], done.stderr[-300:]])
    passed, skipped = (int(n) for n in re.findall(r"(\d+) (?:passed|skipped)", done.stdout))
    assert passed >= FEWEST_PASSED
    report.append(f"tests of pages: {passed} passed, {skipped} need Linux, and say why")
