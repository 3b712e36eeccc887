"""The checks on another checkout of quire, where defects that were mended since must show.

The checkout stays as it is: its sources are copied, and what they need is built beside the copy.
"""

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.metal.darwin.product import BUILD, OTHER, OTHER_BIN, RUNG, Product

ROOT = RUNG.parents[2]
INCLUDE = "include(${CMAKE_CURRENT_LIST_DIR}/../darwin/mac_memory.cmake)\n"
TOLD_CHARS = 300
KERNELS = "metal_ext/kernels/metal"
# What a Mac finds wrong with a checkout from before, and the checks that say so.
DEFECTS = {
    "serve does not start where open files have no limit": (
        "check_serve.py::test_a_mac_in_use_serves_from_its_gpu[16 GB, macOS 26-sparse]",
    ),
    "make test needs GNU make 4": (
        "check_makefile.py::test_the_makefile_is_for_a_macs_make_and_tools",
    ),
    "tests need pages of 4 KiB, and MLX on the CPU": (
        "check_tests.py::test_tests_of_pages_pass_or_say_why_not",
    ),
    "under pressure one request waits for the other": (
        "check_pressure.py::test_a_request_does_not_wait_for_another_one_to_end",
    ),
    "under pressure prefixes are dropped, which frees nothing": (
        "check_pressure.py::test_a_prompt_is_found_again",
    ),
    "a model that fits is refused, because little is available": (
        "check_budget.py::test_a_model_that_fits_the_working_set_is_served[8 GB, macOS 26-4B]",
        "check_budget.py::test_a_model_that_fits_the_working_set_is_served[16 GB, macOS 26-8B]",
        "check_budget.py::test_a_model_that_fits_the_working_set_is_served[24 GB, macOS 26-14B]",
    ),
}


def prepared(checkout: Path) -> Product:
    """A copy with the stand-ins built in it, our rung among its tests."""
    there = BUILD / "against" / checkout.resolve().name
    unneeded = shutil.ignore_patterns(".*", "build", "__pycache__")
    shutil.copytree(checkout, there, ignore=unneeded, dirs_exist_ok=True)
    shutil.copytree(RUNG, there / "tests/metal/darwin", ignore=unneeded, dirs_exist_ok=True)
    standins = there / "tests/metal/graph/standins.cmake"
    if "mac_memory.cmake" not in standins.read_text():
        standins.write_text(standins.read_text() + INCLUDE)
    differ = filecmp.dircmp(ROOT / KERNELS, there / KERNELS)
    others = [*differ.diff_files, *differ.left_only, *differ.right_only]
    assert not others, f"its kernels are others: {others}"
    settings = {
        "VENV": checkout.resolve() / ".venv",
        "MAC_WHEEL": ROOT / "build/metal/mac26",
        "KERNELS": ROOT / "build/metal/kernels/plain/kernels.so",
    }
    variables = [f"{name}={value}" for name, value in settings.items()]
    make = ["make", "-C", str(there / "tests/metal/graph"), "build", "stage", *variables]
    subprocess.run(make, stdout=subprocess.DEVNULL, check=True)
    product = Product(there, checkout.resolve() / ".venv" / "bin")
    product.stage()
    return product


def compare(checkout: Path, defects: Mapping[str, tuple[str, ...]] = DEFECTS) -> int:
    """Prints how each defect shows there. 1 where one does not."""
    there = prepared(checkout)
    environment = os.environ | {OTHER: str(there.folder), OTHER_BIN: str(there.bin)}
    hidden = 0
    for defect, checks in defects.items():
        for check in checks:
            pytest = "-m pytest -x --tb=short -p no:cacheprovider -o python_files=check_*.py"
            run = subprocess.run(
                [sys.executable, *pytest.split(), RUNG / check],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            hidden += run.returncode == 0
            end = "passes" if run.returncode == 0 else f"fails: {last_words(run.stdout)}"
            print(f"{defect}\n   {check}\n   there {end}", flush=True)
    print(f"{len(defects)} defects, {hidden} checks do not find theirs")
    return 1 if hidden else 0


def last_words(said: str) -> str:
    """What says best why a check fails."""
    errors = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
    own = [line for line in errors if line.startswith("quire: ")]  # of a server's log
    return (own or errors or [said[-TOLD_CHARS:]])[0]
