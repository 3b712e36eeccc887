"""The Makefile, and the commands of jobs on macOS, are for what a Mac has: GNU make 3.81 and BSD's
tools. The workflows name what exists: a runner would fail only after everything before it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def everything_named(pattern: str) -> set[str]:
    return {match for path in WORKFLOWS for match in re.findall(pattern, path.read_text())}


@pytest.mark.parametrize("name", sorted(everything_named(r"(?<![\w./-])((?:tests|\.ci)/[\w./]+)")))
def test_a_file_that_a_workflow_names_exists_and_can_be_run(name: str) -> None:
    path = ROOT / name
    assert path.is_file() or (path / "Makefile").is_file()
    assert path.is_dir() or name.endswith((".py", ".md")) or os.access(path, os.X_OK)


@pytest.mark.parametrize("name", sorted(everything_named(r"-m (tests[\w.]*)")))
def test_a_module_that_a_workflow_names_exists(name: str) -> None:
    assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize(
    "name", sorted(everything_named(r"\bmake ((?:-C )?[\w./-]+(?: [\w./-]+)?)"))
)
def test_a_target_that_a_workflow_names_exists(name: str) -> None:
    folder, target = name.split()[1:] if name.startswith("-C ") else (".", name.split()[0])
    makefile = (ROOT / folder / "Makefile").read_text()
    targets = [
        line.split(":")[0] for line in makefile.splitlines() if re.match(r"[^\s#=]+.*:", line)
    ]
    assert target.replace(".venv", "$(VENV)") in " ".join(targets).split()


def test_the_comparison_reads_what_the_cross_build_writes() -> None:
    workflow = (ROOT / ".github/workflows/macos.yml").read_text()
    makefile = (ROOT / "tests/metal/cross/Makefile").read_text()
    assert "build/metal/cross-mac26/symbols.json" in workflow
    assert "$(BUILD)/cross-mac26/symbols.json" in makefile


NEWER_MAKE = {
    "3.82": r"^\.(ONESHELL|RECIPEPREFIX)\b|^\s*(private|undefine)\s|^define .*=\s*$",
    "4.0": r"--output-sync|-O(target|line|recurse)|--trace|!=|::=|\$\((file|guile) |^load ",
    "4.2": r"\.SHELLSTATUS",
    "4.3": r"&:|\.EXTRA_PREREQS",
    "4.4": r"\$\((let|intcmp) |\.WAIT\b|\.NOTINTERMEDIATE\b|:::=|--shuffle|--jobserver-style",
}
NO_BSD_TOOL = {
    r"\b(nproc|sha256sum|md5sum|tac|setarch|timeout|ldd|ip|ss|free|pidof|setsid|shuf|flock)\b": (
        "is not there"
    ),
    r"\b(apt|apt-get|dpkg|systemctl)\b": "is Linux's",
    r"\bsed\b[^|]*\\[tnwdsS+?|]": "sed knows no \\t, \\n, \\+ and the like",
    r"\bsed -(i|[a-zA-Z]*i)\s+(?!'')": "sed -i needs a suffix",
    r"\bsed -[a-zA-Z]*r|\bsed --": "sed has -E, and no long options",
    r"\bexpand -[^t]|\bexpand .*--": "expand has -t alone",
    r"\bgrep -[a-zA-Z]*P|\bgrep .*--(perl|only|include)": "grep has no Perl",
    r"\breadlink -[a-z]*[fem]|\brealpath -": "readlink has no -f on older systems",
    r"\b(cp|mv|rm|ln|mkdir) -- |\bcp -[a-zA-Z]*[ltuT]\b|\bcp --": "GNU's option",
    r"\bdate -(d|I)|\bdate --": "date has no -d",
    r"\bstat -c|\bstat --": "stat has -f",
    r"\bxargs -[a-zA-Z]*[drd]\b|\bxargs --": "xargs has no -d and no -r",
    r"\bfind\b.* -(printf|regextype|readable|executable)\b|\bfind -": "find needs a folder first",
    r"\bsort -[a-zA-Z]*[VhR]|\bsort --": "GNU's option",
    r"\b(head|tail) -n -\d|\b(head|tail) --|\bdu --|\bls --|\btouch -d|\btouch --": "GNU's option",
    r"\bmktemp --|\btar --(transform|sort|owner)|\bbase64 -w|\bseq -": "GNU's option",
    r"\becho -[en]\b": "sh's echo takes no options",
    r"/proc/|/dev/shm": "is not there",
}


def faults(text: str) -> list[str]:
    """Return the lines of a Makefile or a script that a Mac does not understand."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"(^|\s)#.*", "", line)
        # Where a newer make is asked for first, the older one is given nothing.
        code = re.sub(r"\$\(if \$\(filter [a-z-]+,\$\(\.FEATURES\)\),[^)]*\)", "", code)
        for version, pattern in NEWER_MAKE.items():
            if re.search(pattern, code):
                found.append(f"{number}: needs GNU make {version}: {line.strip()}")
        for pattern, why in NO_BSD_TOOL.items():
            if match := re.search(pattern, code):
                found.append(f"{number}: {match[0]!r}: {why}: {line.strip()}")
    return found


def commands_on_macos(workflow: Path) -> str:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    macs = [job for job in jobs if "macos" in str(job["runs-on"])]
    return "\n".join(step["run"] for job in macs for step in job["steps"] if "run" in step)


def test_the_makefile_is_for_a_macs_make_and_tools() -> None:
    assert faults((ROOT / "Makefile").read_text()) == []


def test_continuous_integration_asks_a_mac_for_what_it_has() -> None:
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert faults(commands_on_macos(workflow)) == [], workflow.name


def test_help_names_every_target_that_says_what_it_does() -> None:
    # Not as a part of the make that runs the tests.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(
        ["make", "help"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True
    )
    documented = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [re.fullmatch(r"([a-z0-9-]+) +(\S.*)", line) for line in said.stdout.splitlines()]
    assert [line[1] for line in lines if line is not None] == documented
    assert None not in lines
