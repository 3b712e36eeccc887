import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.bench import instruction_sets, llama
from tests.bench.compare import Case, Seen
from tests.bench.contest import Contest
from tests.bench.instruction_sets import (
    ALONE,
    ROUNDED,
    Cases,
    check_instruction_set,
    loaded_kernels,
    prompt_rates,
    rounded_activations,
    run_instruction_sets,
    sets_text,
)
from tests.bench.llama import LIBRARY, PROGRAMS, Builds, features
from tests.bench.load import Answer, LoadResult
from tests.bench.models import ModelStore
from tests.bench.peers import BrokenError
from tests.bench.programs import LlamaServer, Program, Startable
from tests.bench.rounds import Part, Rounds
from tests.bench.sizes import FULL, QUICK, SetsWork
from tests.models import ModelSpec
from tests.published import Published

MIB = 1024**2
WORK = SetsWork((252,), (2,), (4,))


class Saying:
    """A server that says what it runs with."""

    label, pid = "quire", os.getpid()

    def __init__(self, program: Startable, log: str) -> None:
        self.program, self._log = program, log

    def log(self) -> str:
        return self._log


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Startable]:
    """What would have been started, in its order. Every case has the same figures."""
    programs: list[Startable] = []

    @contextmanager
    def server(program: Startable, threads: int) -> Iterator[Startable]:
        programs.append(program)
        yield program

    def compared(
        seen: Seen, contestants: Sequence[Startable], cases: Sequence[Case], *_: object
    ) -> None:
        for contestant in contestants:
            for case in cases:
                answers = [Answer(0.0, 4.0, (1.0, 2.0, 4.0), 1, 64, "length", None)] * case.requests
                seen[contestant.label, case].note(LoadResult(answers, 0.1))

    monkeypatch.setattr(instruction_sets, "Server", server)
    monkeypatch.setattr(instruction_sets, "compare_round", compared)
    monkeypatch.setattr(instruction_sets, "MEMORY_BYTES", 2 * MIB)
    monkeypatch.setattr(instruction_sets, "check_instruction_set", lambda *_: None)
    monkeypatch.setattr(llama, "here", lambda: ["vnni", "avx2"])
    return programs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part on a tiny model, with builds of nothing."""
    for name in ("vnni", "avx2"):
        folder = tmp_path / "llama" / name / "bin"
        folder.mkdir(parents=True)
        for file in (LIBRARY, *PROGRAMS):
            (folder / file).touch()
    monkeypatch.setattr(llama, "_check_sources", lambda _: None)
    monkeypatch.setattr(llama, "_features", lambda library: features(library.parts[-3]))
    store = ModelStore(tmp_path, Published(ModelSpec(vocab_size=300)))
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(bytes(1000))
    monkeypatch.setattr(ModelStore, "gguf", lambda _: weights)
    monkeypatch.setattr(ModelStore, "gguf_quantised", lambda *_: weights)

    def run(rounds: int, asked: tuple[str, ...] = (), *, quantised: bool = False) -> Part:
        contest, builds = Contest(1, count()), Builds(tmp_path / "llama")
        most = Rounds(rounds, 60)
        return run_instruction_sets(most, WORK, contest, store, builds, asked, quantised=quantised)

    return run


def test_every_row_names_its_set_and_its_side(run: Any, started: list[Startable]) -> None:
    part = run(1, quantised=True)
    kinds = ["prompt of", "decode", "decode", "decode", "252 in", "time to"]
    assert [row.instruction_set for row in part.rows] == ["vnni"] * 12 + ["avx2"] * 12
    assert all(row.name.startswith(kind) for row, kind in zip(part.rows, kinds * 4, strict=True))
    rounded = ["int8 activations" in row.name for row in part.rows]
    assert rounded == ([False] * 6 + [True] * 6) * 2
    assert {row.peer_name for row in part.rows} == {"llama-server", "read probe"}
    goals = {row.name: row.goal.text for row in part.rows if row.goal is not None}
    assert goals == {
        "prompt of 252 tokens": "ratio >= 1.2",
        "prompt of 252 tokens, int8 activations": "ratio >= 1.2",
        "decode at 1 stream, weights alone": "ratio >= 0.75",
        "decode, int8 activations at 1 stream, weights alone": "ratio >= 0.75",
        "252 in, 64 out, 4 streams": "ratio >= 1.3",
        "252 in, 64 out, int8 activations, 4 streams": "ratio >= 1.3",
    }
    rates = {row.name: row.quire for row in part.rows}
    assert rates["prompt of 252 tokens"] == 252.0
    assert rates["decode, 2 streams"] == 42.0
    facts = dict(part.facts)
    assert facts["instruction sets"].startswith("vnni, avx2; could not run: amx, bf16, avx512")
    assert "other programs" in facts


def test_in_4_bits_one_stream_should_read_as_the_probe_does(
    run: Any, started: list[Startable]
) -> None:
    part = run(1, ("avx2",), quantised=True)
    (plain, rounded) = [row for row in part.rows if row.peer_name == "read probe"]
    assert plain.goal is not None
    assert rounded.goal is not None
    assert plain.goal.text == rounded.goal.text == "ratio >= 0.75"
    assert "4 bits" in dict(part.facts)["weights"]


def test_bfloat16_weights_have_a_rounded_side_in_one_set_alone(
    run: Any, started: list[Startable]
) -> None:
    run(1)
    assert [program.label for program in started] == ["quire", "llama-server"] * 2
    sides = {name: rounded_activations(name, quantised=False) for name in ("bf16", "amx", "avx2")}
    assert sides == {"bf16": "bfloat16", "amx": None, "avx2": None}


def test_one_sets_servers_run_at_a_time_and_rounds_go_over_all_sets(
    run: Any, started: list[Startable]
) -> None:
    run(2, quantised=True)
    labels = [program.label for program in started]
    assert labels == ["quire", ROUNDED, "llama-server"] * 4
    kernels = [its.kernels.parts[-2] for its in started if isinstance(its, LlamaServer)]
    assert kernels == ["vnni", "avx2", "avx2", "vnni"]
    told = [" ".join(its.arguments) for its in started if isinstance(its, Program)]
    assert [line.partition("engine.instruction_set=")[2].split()[0] for line in told] == (
        ["vnni"] * 2 + ["avx2"] * 4 + ["vnni"] * 2
    )
    assert ["engine.activations=int8" in line for line in told] == [False, True] * 4


def test_a_set_that_the_processor_has_not_is_said_to_be_missing(
    run: Any, started: list[Startable]
) -> None:
    part = run(1, ("avx2", "amx"))
    assert {row.instruction_set for row in part.rows} == {"avx2"}
    assert dict(part.facts)["instruction sets"] == (
        "avx2; not asked for: vnni; could not run: amx, bf16, avx512"
    )
    with pytest.raises(BrokenError, match="this processor has none of amx"):
        run(1, ("amx",))


def test_arm64_lacks_no_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "here", lambda: ["dotprod"])
    assert sets_text(["dotprod"]) == "dotprod; could not run: none"


def test_a_server_that_runs_with_another_set_is_not_compared() -> None:
    program: Any = Program("quire", "quire", (), "bench")
    says: Any = Saying(program, "device  substrate: posix; kernels: vnni, 2 threads")
    check_instruction_set(says, "vnni")
    with pytest.raises(BrokenError, match="quire runs with vnni, not with avx2"):
        check_instruction_set(says, "avx2")
    silent: Any = Saying(program, "")
    with pytest.raises(BrokenError, match="quire runs with nobody knows what, not with avx2"):
        check_instruction_set(silent, "avx2")
    folder = Path("/builds/avx2/bin")
    other: Any = Saying(LlamaServer(folder, folder, Path("x.gguf"), 1, 64), "")
    with pytest.raises(BrokenError, match="nobody knows what, not with /builds/avx2/bin"):
        check_instruction_set(other, "avx2")


def test_the_kernels_that_are_loaded_are_in_the_map_of_memory() -> None:
    maps = (
        "7f31-7f32 r-xp 00000000 fe:00 1 /builds/bf16/bin/libggml.so.0.25.3\n"
        "7f33-7f34 r-xp 00000000 fe:00 2 /some where/avx2/bin/libggml-cpu.so.0.25.3\n"
    )
    assert loaded_kernels(maps) == "/some where/avx2/bin"
    assert loaded_kernels("") == ""


def test_a_prompts_rate_is_its_tokens_over_the_time_to_the_first() -> None:
    assert prompt_rates(252, [126.0, 252.0]) == [2000.0, 1000.0]


@pytest.mark.parametrize("size", [QUICK, FULL])
def test_one_stream_decodes_in_every_round_and_no_case_comes_twice(size: Any) -> None:
    cases = Cases.of(size.sets_work)
    assert cases.decodes[0] == ALONE
    assert len(set(cases.all)) == len(cases.all)
    longest = max(case.prompt_tokens + case.max_tokens for case in cases.all)
    assert longest <= instruction_sets.SLOT_TOKENS
    assert max(case.streams for case in cases.all) <= instruction_sets.SLOTS
