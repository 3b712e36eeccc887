"""The style that no linter checks, as tests."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from server.config import Config

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "kvcache", "metal_ext")
MAX_FILE_LINES = 300
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
LOCKS = (
    "requirements.lock",
    "requirements-dev.lock",
    "tests/docker/requirements.lock",
    "tests/metal/cross/requirements.lock",
    "tests/page/requirements.lock",
)
# Sources whose tests stand elsewhere, and where.
TESTED_ELSEWHERE = {
    "kvcache/metal_step_rows.py": "tests/kvcache/test_metal_backend.py",
    "engine/runner.py": "tests/engine/test_recall_engine.py",
    "engine/models/qwen3.py": "tests/engine/test_qwen3.py",
    "engine/models/packed_qwen3.py": "tests/engine/test_packed_qwen3.py",
    "engine/config.py": "tests/engine/test_build.py",
    "engine/step_plan.py": "tests/engine/test_scheduler.py",
    "engine/logprobs.py": "tests/engine/test_sampler.py",
    "engine/messages.py": "tests/engine/test_loop.py",
    "engine/types.py": "tests/engine/test_scheduler.py",
    "engine/token_stream.py": "tests/engine/test_client.py",
    "engine/errors.py": "tests/engine/test_client.py",
    "engine/kv_door.py": "tests/engine/test_shared_prefixes.py",
    "engine/safetensors_headers.py": "tests/engine/test_checkpoint.py",
    "server/text/grammar/fork_server.py": "tests/server/text/grammar/test_judge.py",
    "server/text/grammar/judging.py": "tests/server/text/grammar/test_judge.py",
    "server/text/grammar/tokenizer_facts.py": "tests/server/text/grammar/test_judge.py",
    "server/text/grammar/constraint_spec.py": "tests/server/text/grammar/test_compiler.py",
    "server/protocol/responses/fields.py": "tests/server/protocol/test_fields.py",
    "kvcache/inspector.py": "tests/kvcache/test_manager.py",
    "kvcache/backend.py": "tests/kvcache/test_native_backends.py",
    "kvcache/block_allocator.py": "tests/kvcache/test_manager.py",
    "kvcache/native_memory.py": "tests/kvcache/test_native_backends.py",
    "kvcache/buffer_pool.py": "tests/kvcache/test_manager.py",
    "kvcache/sequences.py": "tests/kvcache/test_prefix_cache.py",
    "kvcache/stats.py": "tests/kvcache/test_manager.py",
    "server/startup_errors.py": "tests/server/test_cli.py",
    "server/guards/refusals.py": "tests/server/guards/test_connections.py",
    "server/protocol/refusals.py": "tests/server/metrics/test_requests.py",
    "server/guards/slashes.py": "tests/server/test_app.py",
}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", SOURCES + NATIVE, ids=names(SOURCES + NATIVE))
def test_a_file_is_one_thing_and_fits_its_measure(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_FILE_LINES
    assert all(len(line) <= MAX_COLUMNS for line in lines)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text())


def test_native_numbers_become_narrower_only_where_they_are_checked() -> None:
    sources = [path for path in NATIVE if "csrc" in path.parts and path.suffix in {".cpp", ".h"}]
    narrow = [path.name for path in sources if NARROW.search(path.read_text())]
    assert not narrow, "narrowed() of core/checked.h refuses by name what does not fit"


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_functions_fit_a_screen_and_nothing_prints(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.body[0].lineno
            assert length <= MAX_FUNCTION_LINES, node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print" or path.name == "cli.py"


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.name != "__init__.py"],
    ids=names([path for path in SOURCES if path.name != "__init__.py"]),
)
def test_every_source_has_its_tests(path: Path) -> None:
    source = path.relative_to(ROOT)
    mirror = ROOT / "tests" / source.parent / f"test_{source.name}"
    assert mirror.is_file() or (ROOT / TESTED_ELSEWHERE.get(str(source), "nowhere")).is_file()


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


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        used = set(re.findall(r"`make ([a-z0-9-]+)", (ROOT / document).read_text()))
        assert used <= targets, document


def test_the_settings_in_the_readme_can_be_read() -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    assert {kind for kind, _ in blocks} == set(readers)
    for kind, text in blocks:
        assert "http://127.0.0.1:8000/v1" in str(readers[kind](text))


def test_locks_carry_versions_and_hashes_and_no_address() -> None:
    for lock in LOCKS:
        text = (ROOT / lock).read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
        assert not re.search(r"^-{1,2}(i|index|extra|find)", text, re.MULTILINE)


def test_mlx_and_nanobind_are_pinned_exactly_and_alike_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package in ("mlx", "nanobind"):
        pins = set(re.findall(rf'"{package}(?:\[cpu\])?==([0-9.]+)', text))
        assert len(pins) == 1
        for lock in ("requirements.lock", "requirements-dev.lock"):
            locked = re.findall(rf"^{package}==([0-9.]+)", (ROOT / lock).read_text(), re.MULTILINE)
            assert set(locked) == pins


def test_the_cross_build_has_the_build_tools_of_the_native_one() -> None:
    native, cross = (
        dict(re.findall(r"^([a-z-]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE))
        for lock in ("requirements.lock", "tests/metal/cross/requirements.lock")
    )
    for tool in ("cmake", "nanobind", "ninja", "scikit-build-core"):
        assert cross[tool] == native[tool], tool
