"""The style that no linter checks, as tests."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from server.config import Config

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT, capture_output=True, text=True, check=True,
)  # fmt: skip
DOCUMENTS = [name for name in LISTED.stdout.splitlines() if (ROOT / name).is_file()]
PACKAGES = ("server", "engine", "kvcache", "metal_ext")
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 100

SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
NATIVE = [
    path
    for folder in ("csrc", "kernels")
    for path in sorted((ROOT / "metal_ext" / folder).rglob("*"))
    if path.suffix in {".cpp", ".h", ".c", ".metal"}
]
NARROW = re.compile(r"static_cast<(unsigned|short|(unsigned )?int|u?int(8|16|32)_t)>")
# The interpreter without an option behind it, or a use of its path that runs nothing.
UNSAFE_PYTHON = re.compile(r'(?:sys\.|import )executable(?!,\s*"-[PI]"|\)\.with_name\()')
LOCKS = ROOT / "configs" / "locks"


def test_native_lines_fit_their_columns_and_leave_nothing_to_do() -> None:
    lines = [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in NATIVE
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert [place for place, line in lines if len(line) > MAX_COLUMNS] == []
    assert [place for place, line in lines if re.search(r"\b(TODO|FIXME|XXX)\b", line)] == []


def test_native_numbers_become_narrower_only_where_they_are_checked() -> None:
    sources = [path for path in NATIVE if "csrc" in path.parts and path.suffix in {".cpp", ".h"}]
    narrow = [path.name for path in sources if NARROW.search(path.read_text())]
    assert not narrow, "narrowed() of core/checked.h refuses by name what does not fit"


def test_no_child_imports_from_the_working_directory() -> None:
    found = {path.name for path in SOURCES if UNSAFE_PYTHON.search(path.read_text())}
    assert found == set(), "-P leaves the working directory out of the path of imports"
    for source in ("[sys.executable, '-m']", "(\nsys.executable,\n*options)", "import executable"):
        assert UNSAFE_PYTHON.search(source)


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_settings_file_documents_every_setting_with_its_default() -> None:
    text = (ROOT / "configs/quire.toml").read_text()
    written = tomllib.loads(text)
    for section, values in Config().model_dump().items():
        for name, default in values.items():
            if default is None:
                assert re.search(rf"^# {name} = ", text, re.MULTILINE), f"[{section}] {name}"
            else:
                assert name in written[section], f"[{section}] {name}"
    assert Config.model_validate(written) == Config(), "the file's values are the defaults"


def targets_of(folder: Path) -> set[str]:
    text = (folder / "Makefile").read_text()
    lines = re.findall(r"^((?:[a-z0-9-]+ ?)+):", text, re.MULTILINE)
    return {name for line in lines for name in line.split()}


def test_the_commands_of_the_documents_exist() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        assert set(re.findall(r"`make ([a-z0-9][a-z0-9-]*)", text)) <= targets_of(ROOT), document
        for folder, target in re.findall(r"make -C (\S+) ([a-z0-9-]+)", text):
            assert target in targets_of(ROOT / folder), f"{document}: make -C {folder} {target}"
        for module in re.findall(r"python -m (tests[a-z_.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{document}: {module}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            target = (ROOT / document).parent / link if link else ROOT / document
            assert target.exists(), f"{document}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", title).lower() for title in titles]
                assert anchor in [it.replace(" ", "-") for it in anchors], f"{document}: {anchor}"


def test_the_settings_for_clients_can_be_read() -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "server/README.md").read_text(), re.DOTALL)
    readers = {"toml": tomllib.loads, "yaml": yaml.safe_load}
    assert {kind for kind, _ in blocks} == set(readers)
    for kind, text in blocks:
        assert "http://127.0.0.1:8000/v1" in str(readers[kind](text))


def test_locks_carry_versions_and_hashes_and_no_address() -> None:
    for lock in LOCKS.glob("*.lock"):
        text = lock.read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
        assert not re.search(r"^-{1,2}(i|index|extra|find)", text, re.MULTILINE)


def test_mlx_and_nanobind_are_pinned_exactly_and_alike_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package in ("mlx", "nanobind"):
        pins = set(re.findall(rf'"{package}(?:\[cpu\])?==([0-9.]+)', text))
        assert len(pins) == 1
        for lock in ("requirements.lock", "requirements-dev.lock"):
            locked = re.findall(rf"^{package}==([0-9.]+)", (LOCKS / lock).read_text(), re.MULTILINE)
            assert set(locked) == pins


def test_the_builds_of_wheels_have_the_build_tools_of_the_native_one() -> None:
    native, cross, linux = (
        dict(re.findall(r"^([a-z-]+)==(\S+)", (LOCKS / lock).read_text(), re.MULTILINE))
        for lock in ("requirements.lock", "metal-cross.lock", "install.lock")
    )
    for tool in ("cmake", "nanobind", "ninja", "scikit-build-core"):
        assert cross[tool] == linux[tool] == native[tool], tool


def test_tests_wait_for_memory_that_is_on_its_way_back() -> None:
    """A loop that ends with the first step that does nothing ends early by chance: see steps()."""
    found = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"while loop\.run_once\(\):", path.read_text(encoding="utf-8"))
        and path != Path(__file__)
    ]
    assert found == []
