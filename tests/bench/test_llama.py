import re
from pathlib import Path

import pytest

from tests.bench import llama
from tests.bench.llama import (
    FLAGS,
    LIBRARY,
    LOCK,
    BuildError,
    Builds,
    build,
    commands,
    definitions,
    features,
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run."""
    commands: list[list[str]] = []
    monkeypatch.setattr(llama, "_run", lambda command: commands.append(list(command)))
    monkeypatch.setattr(llama, "_program", lambda name: name)
    monkeypatch.setattr(llama, "sources", lambda folder: folder / "sources")
    return commands


def put(folder: Path, name: str, *files: str) -> Path:
    """Empty files where a build has them."""
    its = folder / name / "bin"
    its.mkdir(parents=True, exist_ok=True)
    for file in files:
        (its / file).touch()
    source = folder / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"
    (folder / name / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n")
    return its


def on(name: str, *has: str) -> set[str]:
    """What cmake is told to use."""
    defined = [one.removeprefix("-DGGML_").split("=") for one in definitions(name, has)]
    return {flag for flag, value in defined if value == "ON"}


def test_the_package_has_a_version_and_a_hash_and_no_address() -> None:
    text = LOCK.read_text()
    assert re.fullmatch(r"[\w-]+==[\d.]+ \\\n +--hash=sha256:[0-9a-f]{64}\n", text)
    assert llama.version() == "llama-cpp-python 0.3.36"


def test_each_set_is_built_with_its_own_instructions_and_without_the_others() -> None:
    assert on("avx2") == {"SSE42", "AVX", "F16C", "FMA", "AVX2", "BMI2"}
    assert on("avx512") - on("avx2") == {"AVX512"}
    assert on("vnni", "avx512vbmi") - on("avx512") == {"AVX512_VBMI", "AVX512_VNNI"}
    assert on("bf16") - on("vnni") == {"AVX512_BF16"}
    assert on("amx") - on("bf16") == {"AMX_TILE", "AMX_INT8", "AMX_BF16"}
    assert on("dotprod") == {"NATIVE"}
    assert len({len(definitions(name, ())) for name in FLAGS}) == 1, "none is left to a default"


def test_what_a_processor_of_the_set_has_not_is_left_out() -> None:
    assert "AVX512_VBMI" not in on("vnni")
    assert "AVX512_VBMI" in on("vnni", "avx512vbmi", "avx2")


def test_sets_are_told_apart_by_what_their_kernels_answer() -> None:
    answers = [frozenset(features(name)) for name in FLAGS if name != "dotprod"]
    assert len(set(answers)) == len(answers)
    assert features("vnni") == {"avx2", "avx512", "avx512_vnni"}


def test_programs_are_built_once_and_kernels_for_every_other_set(
    tmp_path: Path, ran: list[list[str]]
) -> None:
    build(tmp_path, ["vnni", "avx2"])
    targets = [command[3:] for command in ran if command[0] == "ninja"]
    assert targets == [["llama-server", "llama-quantize"], ["ggml-cpu"]]
    assert [command[4] for command in ran if command[0] == "cmake"] == [
        str(tmp_path / "vnni"),
        str(tmp_path / "avx2"),
    ]


def test_what_is_there_is_not_built_again(tmp_path: Path, ran: list[list[str]]) -> None:
    put(tmp_path, "bf16", LIBRARY, *llama.PROGRAMS)
    put(tmp_path, "avx2", LIBRARY)
    build(tmp_path, ["vnni", "avx512", "avx2"])
    targets = [command[2:] for command in ran if command[0] == "ninja"]
    assert targets == [
        [str(tmp_path / "vnni"), "ggml-cpu"],
        [str(tmp_path / "avx512"), "ggml-cpu"],
    ]


def test_the_best_set_is_built_in_whole_though_its_kernels_are_there(
    tmp_path: Path, ran: list[list[str]]
) -> None:
    put(tmp_path, "avx2", LIBRARY)
    build(tmp_path, ["avx2"])
    assert ran[1][3:] == ["llama-server", "llama-quantize"]


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(BuildError, match="false ended with code 1"):
        llama._run(["false"])


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(BuildError, match="cmake is missing: pip install cmake"):
        commands(tmp_path, tmp_path, [], [])


def test_kernels_that_were_built_for_another_set_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(tmp_path)
    with pytest.raises(BuildError, match=r"no kernels for vnni .* make llama-server"):
        builds.kernels("vnni")
    folder = put(tmp_path, "vnni", LIBRARY)
    with pytest.raises(BuildError, match="cannot be loaded"):
        builds.kernels("vnni")
    monkeypatch.setattr(llama, "_features", lambda _: {"avx2", "avx512"})
    with pytest.raises(BuildError, match="were built for avx2, avx512: remove"):
        builds.kernels("vnni")
    monkeypatch.setattr(llama, "_features", lambda _: features("vnni"))
    assert builds.kernels("vnni") == folder


def test_what_was_built_from_another_version_is_not_taken(tmp_path: Path) -> None:
    folder = put(tmp_path, "avx2", LIBRARY, *llama.PROGRAMS).parent
    cache = folder / "CMakeCache.txt"
    cache.write_text(cache.read_text().replace("0.3.36", "0.3.35"))
    with pytest.raises(BuildError, match=r"0\.3\.35.*, not from llama-cpp-python 0\.3\.36: remove"):
        _ = Builds(tmp_path).programs
    with pytest.raises(BuildError, match="remove"):
        Builds(tmp_path).kernels("avx2")
    with pytest.raises(BuildError, match="remove"):
        build(tmp_path, ["avx2"])


def test_programs_are_found_in_whichever_build_has_them(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="make llama-server"):
        _ = Builds(tmp_path).programs
    put(tmp_path, "bf16", LIBRARY, "llama-server")
    folder = put(tmp_path, "avx2", LIBRARY, *llama.PROGRAMS)
    assert Builds(tmp_path).programs == folder


def test_a_processor_without_any_set_has_no_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metal_ext.instruction_sets", lambda: ["sse2"])
    assert llama.main(["--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("no llama-server: this processor has none of amx, bf16, vnni")


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_a_part_of_a_repository_is_taken_out_of_the_sources(tmp_path: Path, kind: str) -> None:
    git = tmp_path / ".git"
    if kind == "folder":
        git.mkdir()
        (git / "index").touch()
    elif kind == "file":
        git.touch()
    llama._without_git(tmp_path)
    assert not git.exists()
