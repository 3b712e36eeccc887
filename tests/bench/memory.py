"""What one long conversation takes of this machine's memory: quire's server beside llama.cpp's and
mlx-lm's, each with all of its processes, on the same float32 weights of a narrow model.

One server runs at a time. It is given a prompt of many tokens and answers; a few seconds later, as
it holds the conversation for the next turn, the system is asked what it charges the server for. A
second turn shows how much of the conversation was kept:
who has forgotten it has no memory to compare. Our K and V are as wide as a peer's: bfloat16 beside
llama-server's float16, float32 beside mlx_lm.server's.

Memory are the proportional shares of all pages of all processes (Pss), and pages of memory files
that nobody has mapped now, as quire keeps K and V for those who come back. Private is what no other
process has mapped. What others have mapped too are libraries, those of this benchmark among them.
The account is Linux's.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.contest import OURS, Contest
from tests.bench.load import make_prompt
from tests.bench.models import TEMPLATE_TOKENS, ModelStore, weight_bytes
from tests.bench.peers import BrokenError, Server
from tests.bench.programs import LlamaServer, Startable, mlx_lm_server, quire
from tests.bench.rounds import Part, Rounds
from tests.bench.servers import LLAMA_SERVER
from tests.bench.sharing import read_metrics
from tests.bench.table import Goal, Row
from tests.bench.twenty_turns import RESULT_TOKENS, Turn, ask
from tests.models import ModelSpec
from tests.published import Published

NARROW = Published(
    ModelSpec(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=1536,
        vocab_size=32768,
    )
)
"""mlx-lm's attention over a long prompt takes minutes of a model of a real one's size."""
# Of the second turn, and of both answers.
FURTHER_TOKENS = 1024
MAX_TURN_S = 3600.0
SETTLE_S = 5.0  # longer than quire's idle_release_s
MIB = 1024**2
BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True, slots=True)
class Charge:
    """What the system charges a server for, with all of its processes. Bytes."""

    shares: int
    private: int
    elsewhere: int
    """Parts of shared pages that others are charged for."""

    @classmethod
    def of(cls, rollups: Sequence[Mapping[str, int]], file_bytes: int) -> "Charge":
        """rollups: of all processes. file_bytes: of the memory files that they have open."""

        def total(*names: str) -> int:
            return sum(rollup.get(name, 0) for rollup in rollups for name in names)

        unmapped = max(0, file_bytes - total("Pss_Shmem"))
        return cls(
            total("Pss", "SwapPss") + unmapped,
            total("Private_Clean", "Private_Dirty", "Swap") + unmapped,
            total("Rss") - total("Pss"),
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Of one side: an entry per round."""

    charges: list[Charge] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """The second ones."""
    committed: list[float] = field(default_factory=list)
    """What quire says of its memory files, bytes."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours, and a peer with K and V as wide."""

    width: str
    ours: Startable
    peer: Startable
    our_held: Held = field(default_factory=Held)
    peer_held: Held = field(default_factory=Held)

    def text(self) -> str:
        """What was kept, what others are charged for, and what quire says of itself."""
        sides = {OURS: self.our_held, self.peer.label: self.peer_held}
        found = "; ".join(
            f"{label} {held.turns[-1].cached_tokens} of {held.turns[-1].prompt_tokens} tokens, "
            f"sharing {held.charges[-1].elsewhere / MIB:.0f} MiB more with others"
            for label, held in sides.items()
        )
        committed = self.our_held.committed[-1] / MIB
        return f"kept for the next turn: {found}; {OURS} says {committed:.0f} MiB of K and V"


def run_memory(rounds: Rounds, tokens: int, contest: Contest, folder: Path, programs: Path) -> Part:
    """tokens: of the conversation. folder: where the model goes. programs: where llama-server is.

    Raises BrokenError when a server dies or refuses.
    """
    store = ModelStore(folder, NARROW)
    try:
        pairs = _pairs(store, tokens, contest, programs)
    except ImportError as error:
        raise BrokenError("the package gguf is missing: pip install gguf") from error
    for number in rounds:
        for pair in pairs:
            sides = ((pair.ours, pair.our_held), (pair.peer, pair.peer_held))
            for program, held in sides[:: -1 if number % 2 else 1]:
                _hold(held, program, tokens, contest)
    size = weight_bytes(store.float32())
    rows = [row for pair in pairs for row in _rows(pair, tokens, size)]
    said = f"{tokens} tokens; weights of float32, {size / MIB:.0f} MiB"
    return Part(rows, [("memory", said), *((pair.width, pair.text()) for pair in pairs)])


def _pairs(store: ModelStore, tokens: int, contest: Contest, programs: Path) -> list[Pair]:
    """Raises ImportError without the package ``gguf``."""
    model, threads = store.float32(), contest.threads
    context = tokens + FURTHER_TOKENS
    ours = quire(model, threads)
    half = ours.told(OURS, "--set", "cache.dtype=bfloat16")
    peer = LlamaServer(programs, programs, store.gguf_float32(), 1, context, LLAMA_SERVER)
    pairs = [Pair("K and V in 16 bits", half, peer)]
    if contest.with_mlx_lm:
        pairs.append(Pair("K and V in 32 bits", ours, mlx_lm_server(model, 1)))
    return pairs


def _hold(held: Held, program: Startable, tokens: int, contest: Contest) -> None:
    """A conversation with a server of its own, which is looked at between two turns."""
    seed = next(contest.seeds)
    messages = [{"role": "user", "content": make_prompt(seed, 0, tokens - TEMPLATE_TOKENS)}]
    with Server(program, contest.threads) as server:
        said, _ = ask(server.target, messages, MAX_TURN_S)
        time.sleep(SETTLE_S)
        held.charges.append(charge(server.pid))
        if server.label == OURS:
            held.committed.append(read_metrics(server)["quire_kv_committed_bytes"])
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": make_prompt(seed, 1, RESULT_TOKENS)})
        held.turns.append(ask(server.target, messages, MAX_TURN_S)[1])


# --- what the system says ------------------------------------------------------------------------


def charge(pid: int) -> Charge:
    """Of a process and all below it."""
    parent = psutil.Process(pid)
    rollups: list[dict[str, int]] = []
    files: dict[tuple[int, int], int] = {}
    for process in (parent, *parent.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):  # a helper may end meanwhile
            rollups.append(rollup(Path(f"/proc/{process.pid}/smaps_rollup").read_text()))
            files |= _memory_files(process.pid)
    return Charge.of(rollups, sum(files.values()))


def rollup(text: str) -> dict[str, int]:
    """Bytes, by their names in smaps_rollup."""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}


def _memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes that are allocated, by device and number: several processes may have one open."""

    def found() -> Iterator[tuple[tuple[int, int], int]]:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if str(entry.readlink()).startswith("/memfd:"):
                    its = entry.stat()
                    yield (its.st_dev, its.st_ino), its.st_blocks * BLOCK_BYTES

    return dict(found())


# --- the table -----------------------------------------------------------------------------------


def _rows(pair: Pair, tokens: int, size: int) -> list[Row]:
    """size: of the weights, bytes."""

    def row(what: str, of: Callable[[Charge], int]) -> Row:
        ours, theirs = (
            [of(one) / MIB for one in held.charges] for held in (pair.our_held, pair.peer_held)
        )
        name = f"{what} with {tokens} tokens, {pair.width}"
        return Row.lower_is_better(name, "MiB", ours, (pair.peer.label, theirs))

    rows = [
        row("memory", lambda charge: charge.shares),
        row("memory above the weights", lambda charge: charge.shares - size),
    ]
    return [
        *(row.with_goal(Goal.at_most(row.quire, row.peer, "MiB")) for row in rows),
        row("private memory", lambda charge: charge.private),
    ]
