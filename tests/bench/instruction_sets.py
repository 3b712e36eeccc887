"""quire beside llama-server on every instruction set of this processor, at a real model's size.

For each set a llama-server that was built for it (tests/bench/llama.py), quire that is told to run
with it, and, where quire rounds activations by default, quire that rounds nothing. All have the
same weights. Servers of one set take turns and run alone; rounds go over all sets. sse2 is left
out: it has no peer. What a server runs with is found out, not believed: quire says it, and the
system, which must be Linux, says which library llama-server has loaded.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError

from engine.build import choose_activations
from tests.bench import llama
from tests.bench.compare import Case, Seen, compare_round, compare_rows, nothing_seen
from tests.bench.limits import MEMORY_BYTES, Busy, ReadProbe, others_text
from tests.bench.models import ModelStore, weight_bytes
from tests.bench.peers import OURS, BrokenError, Contest, LlamaServer, Server, Startable, quire
from tests.bench.table import Part, Rounds, Row

LLAMA_SERVER = "llama-server"
EXACT = "quire, float32 activations"
DECODE_PROMPT_TOKENS = 58
PROMPT_TOKENS, ANSWER_TOKENS = 252, 64
MAX_LOAD_S = 300.0
SHORT_PROMPT_TOKENS, SHORT_PROMPT_REQUESTS = 512, 3
SLOTS, SLOT_TOKENS = 8, 4096
LEAST_PROMPT = 1.2
LEAST_WHOLE = {1: 1.1, 4: 1.3, 8: 1.3}
LEAST_OF_READ_BANDWIDTH = 0.75
"""In 4 bits."""
ALONE = Case(1, DECODE_PROMPT_TOKENS, ANSWER_TOKENS, 1, MAX_LOAD_S)
"""One stream, decoding: in every round."""
KERNELS = re.compile(r"kernels: (\w+)")


@dataclass(frozen=True, slots=True)
class SetsWork:
    """The cases that a round asks of each server."""

    prompts: tuple[int, ...]
    """Their tokens."""
    decode_streams: tuple[int, ...]
    """Beside one."""
    whole_streams: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    prompts: list[Case]
    decodes: list[Case]
    whole: list[Case]

    @classmethod
    def of(cls, work: SetsWork) -> "Cases":
        """Return prompts alone (two tokens each, as the first one's time needs a second one),
        answers to short prompts, and both together."""
        return cls(
            [
                Case(1, n, 2, SHORT_PROMPT_REQUESTS if n <= SHORT_PROMPT_TOKENS else 1, MAX_LOAD_S)
                for n in work.prompts
            ],
            [ALONE, *(replace(ALONE, streams=n) for n in work.decode_streams)],
            [Case(n, PROMPT_TOKENS, ANSWER_TOKENS, 1, MAX_LOAD_S) for n in work.whole_streams],
        )

    @property
    def all(self) -> list[Case]:
        return [*self.prompts, *self.decodes, *self.whole]


@dataclass(frozen=True, slots=True)
class Weights:
    """The same numbers in the formats of either side."""

    ours: Path
    theirs: Path
    quantised: bool
    read_whole: bool
    """By every token."""

    @classmethod
    def of(cls, store: ModelStore, programs: Path, *, quantised: bool) -> "Weights":
        """programs: the folder of llama-quantize. Raises BrokenError."""
        try:
            if quantised:
                theirs = store.gguf_quantised(programs / "llama-quantize")
                return cls(store.quantised(), theirs, quantised, store.is_read_whole)
            return cls(store.bfloat16(), store.gguf(), quantised, store.is_read_whole)
        except ImportError as error:
            raise BrokenError("the package gguf is missing: pip install gguf") from error
        except CalledProcessError as error:
            raise BrokenError(f"llama-quantize failed: {error.stderr.decode()[-200:]}") from error

    def text(self) -> str:
        """Say how many bytes each side reads for a token."""
        ours, theirs = (weight_bytes(model) / 1e9 for model in (self.ours, self.theirs))
        form = f"4 bits, but {LLAMA_SERVER}'s embedding has 6" if self.quantised else "bfloat16"
        return f"{form}: {ours:.3f} GB of quire, {theirs:.3f} GB of {LLAMA_SERVER}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one instruction set."""

    seen: Seen
    read: list[float]
    """GB/s of the read probe, one figure per round."""
    others: list[float]
    """Cores that others took, one figure per round."""


def run_instruction_sets(
    rounds: Rounds,
    work: SetsWork,
    contest: Contest,
    store: ModelStore,
    builds: llama.Builds,
    asked: Sequence[str] = (),
    *,
    quantised: bool = False,
) -> Part:
    """asked: instruction sets; without any, all that this processor has.

    Raises BrokenError when a server dies, runs with another instruction set, or gives an answer
    that is not whole, and BuildError where none was built.
    """
    names = [name for name in llama.here() if name in asked or not asked]
    if not names:
        raise BrokenError(f"this processor has none of {', '.join(asked)}")
    weights = Weights.of(store, builds.programs, quantised=quantised)
    contestants = {name: _contestants(name, contest.threads, weights, builds) for name in names}
    cases = Cases.of(work)
    found: dict[str, Measurement] = defaultdict(lambda: Measurement(nothing_seen(), [], []))
    with ReadProbe(MEMORY_BYTES, contest.threads) as probe:
        for number in rounds:
            for name in names[:: -1 if number % 2 else 1]:
                found[name].read.append(probe.best_bytes_per_s() / 1e9)
                _measure(found[name], name, contestants[name], cases, number, contest)
    rows = [row for name in names for row in _rows(found[name], cases, weights, name)]
    facts = [
        ("instruction sets", sets_text(names)),
        ("weights", weights.text()),
        *_work_facts([found[name] for name in names]),
    ]
    if weights.read_whole:
        facts += [(f"{name}: read limit", _shares_text(found[name], weights)) for name in names]
    return Part(rows, facts)


def _contestants(
    name: str, threads: int, weights: Weights, builds: llama.Builds
) -> list[Startable]:
    """Return the programs of an instruction set, ours first. quire's log at its default level names
    the set that it runs with."""
    settings = ["--log-level", "info", "--set", f"engine.instruction_set={name}"]
    plain = quire(weights.ours, threads).told(OURS, *settings)
    ours = [plain]
    if choose_activations(name, "BF16", quantised=weights.quantised) != "float32":
        ours.append(plain.told(EXACT, "--activations", "float32"))
    programs, kernels = builds.programs, builds.kernels(name)
    return [
        *ours,
        LlamaServer(programs, kernels, weights.theirs, SLOTS, SLOT_TOKENS, LLAMA_SERVER),
    ]


def _measure(
    found: Measurement,
    name: str,
    programs: Sequence[Startable],
    cases: Cases,
    number: int,
    contest: Contest,
) -> None:
    """Run a round of one instruction set."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(its, contest.threads)) for its in programs]
        for server in servers:
            check_instruction_set(server, name)
        before = Busy.now()
        compare_round(found.seen, servers, cases.all, number, contest.seeds)
        found.others.append(Busy.now().others_since(before))


def check_instruction_set(server: Server, name: str) -> None:
    """Raise BrokenError when a server runs with another set."""
    if isinstance(server.program, LlamaServer):
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        running, wanted = loaded_kernels(maps), str(server.program.kernels.resolve())
    else:
        said = KERNELS.search(server.log())
        running, wanted = said[1] if said else "", name
    if running != wanted:
        runs = running or "nobody knows what"
        raise BrokenError(f"{server.label} runs with {runs}, not with {wanted}")


def loaded_kernels(maps: str) -> str:
    """Return the folder of llama.cpp's kernels by a process's map of its memory; empty without
    any."""
    found = re.search(rf"(/.*)/{re.escape(llama.LIBRARY)}[.0-9]*$", maps, re.MULTILINE)
    return found[1] if found else ""


# --- the table -----------------------------------------------------------------------------------


def _rows(found: Measurement, cases: Cases, weights: Weights, name: str) -> list[Row]:
    """Return the rows of one instruction set, those of the default activations first."""
    rows: list[Row] = []
    chosen = choose_activations(name, "BF16", quantised=weights.quantised)
    sides = {OURS: f", {chosen} activations"}
    if chosen != "float32":
        sides[EXACT] = ", float32 activations"
    for label, ending in sides.items():
        of = found.seen, (label, LLAMA_SERVER)
        rows += compare_rows(
            *of, cases.prompts, "prompt_per_s", f"prompt of {{case.prompt_tokens}} tokens{ending}",
            lambda *_: LEAST_PROMPT,
        )  # fmt: skip
        rows += compare_rows(*of, cases.decodes, "together_per_s", f"decode{ending}, {{streams}}")
        if weights.read_whole:
            rows.append(_streaming_row(found, label, ending, weights))
        both = f"{PROMPT_TOKENS} in, {ANSWER_TOKENS} out{ending}, {{streams}}"
        rows += compare_rows(*of, cases.whole, "tokens_per_s", both, least_whole)
        rows += compare_rows(*of, cases.whole, "ttft_ms", f"time to first token, {both}")
    return [row.run_with(name) for row in rows]


def least_whole(_: str, case: Case) -> float | None:
    return LEAST_WHOLE.get(case.streams)


def _streaming_row(found: Measurement, label: str, ending: str, weights: Weights) -> Row:
    """Compare how fast a decode at batch 1 reads the weights, once for every token, with the read
    probe."""
    size = weight_bytes(weights.ours)
    streamed = [size * rate / 1e9 for rate in found.seen[label, ALONE].decode_per_s]
    least = LEAST_OF_READ_BANDWIDTH if weights.quantised else None
    name = f"decode{ending} at 1 stream, weights alone"
    return Row.of(name, "GB/s", streamed, ("read probe", found.read), least)


def sets_text(ran: Sequence[str]) -> str:
    """Name the sets that ran, those that were not asked for, and those that this processor
    lacks."""
    has = llama.here()
    left = [name for name in has if name not in ran]
    missing = [name for name in llama.FLAGS if "dotprod" not in (name, *has) and name not in has]
    said = [
        ", ".join(ran),
        *([f"not asked for: {', '.join(left)}"] if left else []),
        f"could not run: {', '.join(missing) or 'none'}",
    ]
    return "; ".join(said)


def _shares_text(found: Measurement, weights: Weights) -> str:
    """Return each side's share of the read bandwidth at one stream, by its own weights' bytes."""
    read, shares = statistics.median(found.read), []
    for label in sorted({label for label, _ in found.seen}):
        size = weight_bytes(weights.theirs if label == LLAMA_SERVER else weights.ours)
        rate = statistics.median(found.seen[label, ALONE].decode_per_s)
        shares.append(f"{label} {100 * size * rate / 1e9 / read:.0f} % ({rate:.1f} tok/s)")
    return f"decode at 1 stream times its own weights: {', '.join(shares)}"


def _work_facts(found: Sequence[Measurement]) -> list[tuple[str, str]]:
    """Say how much was done, and what the load client and other programs took of a core."""
    measured = [its for one in found for its in one.seen.values()]
    rounds = max(len(its.ttft_ms) for its in measured)
    share = max(max(its.client_share) for its in measured)
    done = (
        f"{rounds} rounds; decode: prompts of {DECODE_PROMPT_TOKENS} tokens, answers of "
        f"{ANSWER_TOKENS}, while all streams are given some"
    )
    return [
        ("work", done),
        (LLAMA_SERVER, f"of {llama.version()}; {SLOTS} slots of {SLOT_TOKENS} tokens"),
        ("load client", f"at most {100 * share:.0f} % of one core"),
        ("other programs", others_text(max(max(one.others) for one in found))),
    ]
