"""Fifty agents with one system prompt, on the memory that twelve dense sequences take."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.build import build_engine, plan_engine
from engine.loop import EngineLoop
from engine.machine import machine_memory
from engine.models.checkpoint import read_checkpoint
from engine.types import Request
from tests.bench.models import SERVING, write_endless_model
from tests.bench.peers import BrokenError
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Goal, Row
from tests.bench.workload import AGENTS, Run, fifty_agents, run_engine
from tests.engines import CONFIG, ON_CPU

MIB = 1024**2
GIB = 1024**3
DENSE_SEQUENCES = 12
MODEL_LENS = (4096, 2048)
ROW_BYTES = SERVING.num_key_value_heads * SERVING.head_dim * 4
TOKENS_PER_BLOCK = 32
PAGE_BYTES = TOKENS_PER_BLOCK * ROW_BYTES
MOST_WASTE_PERCENT = 4.0


def make_engine(model: Path, threads: int, substrate: Any, model_len: int) -> EngineLoop:
    """With memory for twelve dense sequences of ``model_len`` tokens."""
    checkpoint = read_checkpoint(model)
    budget_bytes = dense_bytes(model_len, checkpoint.spec.num_layers)
    config = replace(
        CONFIG,
        substrate=substrate,
        page_bytes=None if substrate == "dense" else PAGE_BYTES,
        heap_bytes=MIB,
        kv_budget_bytes=budget_bytes,
        free_slack_bytes=0,
        max_model_len=model_len,
        max_num_seqs=AGENTS,
        max_num_batched_tokens=2048,
        step_time_target_ms=100.0,
        threads=threads,
        check_every_step=False,
    )
    machine = replace(machine_memory(), available_bytes=GIB)
    plan = plan_engine(config, checkpoint, machine, ON_CPU[substrate])
    if plan.memory.kv_budget_bytes != budget_bytes:
        raise BrokenError(f"{plan.memory.kv_budget_bytes} bytes are not {budget_bytes}")
    return build_engine(plan, config, lambda *_: None, lambda _: None)


def dense_bytes(model_len: int, num_layers: int) -> int:
    """K and V of as many sequences as are dense."""
    return DENSE_SEQUENCES * model_len * 2 * num_layers * ROW_BYTES


# --- mlx-lm --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The same agents in mlx-lm's batches."""

    peak_kv_bytes: int
    seconds: float


def run_mlx_lm(model: Path, agents: Sequence[Request]) -> PeerRun:
    """What mlx-lm's server runs, without HTTP, with places for all: its caches are added up after
    every step, as its server does. Raises BrokenError when an answer is not whole."""
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    loaded = load(str(model))
    generator = BatchGenerator(loaded[0], completion_batch_size=AGENTS, prefill_batch_size=AGENTS)
    started_s = time.perf_counter()
    generator.insert(
        [list(request.prompt_ids) for request in agents],
        [request.params.max_tokens for request in agents],
    )
    peak_bytes = tokens = finished = 0
    while finished < len(agents):
        answers = generator.next()[1]
        tokens += len(answers)
        finished += sum(answer.finish_reason == "length" for answer in answers)
        peak_bytes = max(peak_bytes, generator.prompt_cache_nbytes)
    seconds = time.perf_counter() - started_s
    generator.close()
    if tokens != sum(request.params.max_tokens for request in agents):
        raise BrokenError(f"mlx-lm gave {tokens} tokens")
    return PeerRun(peak_bytes, seconds)


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One workload on all sides; runs by (substrate, longest sequence)."""

    runs: dict[tuple[str, int], Run]
    peer: PeerRun


def run_agents(rounds: Rounds, threads: int, folder: Path) -> Part:
    """In this process. folder: where the model goes.

    Raises BrokenError when an answer is not whole, or somebody waits although there is room.
    """
    model = write_endless_model(folder / "agents", SERVING)
    mx.set_default_device(mx.Device(mx.cpu))
    done = []
    for number in rounds:
        agents = fifty_agents(number)
        kinds = [(kind, length) for length in MODEL_LENS for kind in ("posix", "dense")]
        runs = {
            kind: run_engine(make_engine(model, threads, *kind), agents)
            for kind in kinds[:: -1 if number % 2 else 1]
        }
        done.append(Round(runs, run_mlx_lm(model, agents)))
    return Part(_rows(done), _facts(done))


def _rows(done: Sequence[Round]) -> list[Row]:
    long, short = MODEL_LENS

    def both(length: int) -> tuple[list[Run], list[Run]]:
        sparse, dense = ([one.runs[kind, length] for one in done] for kind in ("posix", "dense"))
        return sparse, dense

    ours, dense = both(long)
    at_once = Row.higher_is_better(
        f"{AGENTS} agents on {DENSE_SEQUENCES} times {long} tokens",
        "at once",
        [float(run.peak_running) for run in ours],
        ("dense", [float(run.peak_running) for run in dense]),
    )
    everybody = all(run.peak_running == AGENTS for run in ours)
    rows = [at_once.with_goal(Goal(f"all {AGENTS}", everybody)), _time_row(long, ours, dense)]
    peak = [one.peer.peak_kv_bytes / MIB for one in done]
    committed = [run.peak_committed_bytes / MIB for run in ours]
    rows.append(Row.lower_is_better("  K and V at the peak", "MiB", committed, ("mlx-lm", peak)))
    rows.append(_waste_row(long, ours, dense))
    ours, dense = both(short)
    rows.append(
        Row.higher_is_better(
            f"{AGENTS} agents on {DENSE_SEQUENCES} times {short} tokens",
            "at once while any wait",
            [run.mean_running for run in ours],
            ("dense", [run.mean_running for run in dense]),
        )
    )
    return [*rows, _time_row(short, ours, dense), _waste_row(short, ours, dense)]


def _time_row(model_len: int, ours: Sequence[Run], dense: Sequence[Run]) -> Row:
    return Row.lower_is_better(
        f"  all answers, at most {model_len} tokens each",
        "s",
        [run.seconds for run in ours],
        ("dense", [run.seconds for run in dense]),
    )


def _waste_row(model_len: int, ours: Sequence[Run], dense: Sequence[Run]) -> Row:
    row = Row.lower_is_better(
        f"  waste in blocks with tokens, at most {model_len} each",
        "%",
        [run.waste_percent for run in ours],
        ("dense", [run.waste_percent for run in dense]),
    )
    return row.with_goal(Goal.at_most(row.quire, MOST_WASTE_PERCENT, "%"))


def _facts(done: Sequence[Round]) -> list[tuple[str, str]]:
    long, short = ([one.runs["posix", length] for one in done] for length in MODEL_LENS)
    crowded = sum(len(run.crowded) for run in short)
    worst = max(run.peak_waste_percent for run in (*long, *short))
    peer_s = statistics.median(one.peer.seconds for one in done)
    preempted = [statistics.median(run.preemptions for run in runs) for runs in (long, short)]
    return [
        ("agents", f"{len(done)} rounds; {TOKENS_PER_BLOCK} tokens per block, fp32, 2 layers"),
        ("exact admission", f"nothing that fits waited in {crowded} steps with somebody waiting"),
        ("worst step's waste", f"{worst:.2f} %"),
        ("preemptions", f"{preempted[0]:g} and {preempted[1]:g} of {AGENTS}"),
        ("mlx-lm's K and V", "nbytes of BatchGenerator's caches after each step, batches of 50"),
        ("mlx-lm's time", f"{peer_s:.1f} s, without HTTP"),
    ]
