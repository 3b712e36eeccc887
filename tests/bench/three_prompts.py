"""A long prompt, a middling one and a short one together, beside the same one after another."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.bench.load import make_prompt, send
from tests.bench.models import SERVING, write_endless_model
from tests.bench.peers import Server
from tests.bench.programs import Program, mlx_lm_server, quire
from tests.bench.prompts import check_answer
from tests.bench.rounds import Part, Rounds
from tests.bench.sharing import read_metrics
from tests.bench.table import Goal, Row

PROMPT_TOKENS = (30_000, 5_000, 10)
# Before the rounds; the peer needs minutes for the long ones.
WARM_UP_TOKENS = (512, 128, 10)
ANSWER_TOKENS = 2
MAX_RUN_S = 300.0
# What two runs of the same work differ by on a machine where nothing else happens.
LEAST_NOISE = 0.05
FIRST_SEED = 3_000_001
COMPUTED = "quire_prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of one server: seconds, one entry per round."""

    together: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the pairs: how much longer they take together."""
        return statistics.median(a / b for a, b in zip(self.together, self.apart, strict=True))

    @property
    def noise(self) -> float:
        """How far the same work is from its own median in most runs."""
        middle = statistics.median(self.apart)
        off = statistics.median(abs(seconds - middle) for seconds in self.apart)
        return max(LEAST_NOISE, 2 * off / middle)


def run_three_prompts(rounds: Rounds, peer_rounds: Rounds, threads: int, folder: Path) -> Part:
    """folder: where the model goes. peer_rounds: of mlx-lm's server, which takes minutes; with none
    it has no part.

    Raises BrokenError when a server dies or an answer is not whole.
    """
    model = write_endless_model(folder / "three-prompts", SERVING)
    seeds = count(FIRST_SEED)
    computed: dict[bool, list[float]] = {True: [], False: []}

    def count_rows(server: Server, run: Callable[[], float], together: bool) -> float:
        before = read_metrics(server)[COMPUTED]
        seconds = run()
        computed[together].append(read_metrics(server)[COMPUTED] - before)
        return seconds

    ours = _measure(quire(model, threads), threads, rounds, seeds, count_rows)
    rows = _rows(ours, computed[True], computed[False])
    if peer_rounds.most > 0:
        program = mlx_lm_server(model, len(PROMPT_TOKENS))
        theirs = _measure(program, threads, peer_rounds, seeds, lambda _, run, __: run())
        rows.append(_peer_row(ours, program.label, theirs))
    return Part(
        rows,
        [
            (
                "three prompts",
                f"{len(ours.apart)} pairs, noise of one after another {ours.noise:.0%}",
            )
        ],
    )


def _measure(
    program: Program,
    threads: int,
    rounds: Rounds,
    seeds: Iterator[int],
    watched: Callable[[Server, Callable[[], float], bool], float],
) -> Pairs:
    """Whichever goes first in one pair goes last in the next."""
    pairs = Pairs()
    with Server(program, threads) as server:
        for together in (True, False):
            asyncio.run(_ask(server, next(seeds), together, WARM_UP_TOKENS))  # nobody counts these
        for number in rounds:
            for together in (True, False)[:: -1 if number % 2 else 1]:
                seed = next(seeds)

                def run(seed: int = seed, together: bool = together) -> float:
                    return asyncio.run(_ask(server, seed, together, PROMPT_TOKENS))

                times = pairs.together if together else pairs.apart
                times.append(watched(server, run, together))
            server.check()
    return pairs


async def _ask(server: Server, seed: int, together: bool, lengths: Sequence[int]) -> float:
    """Seconds from the first request to the last answer's end."""
    started_s = time.perf_counter()
    asks = [_one(server, make_prompt(seed, n, tokens)) for n, tokens in enumerate(lengths)]
    if together:
        await asyncio.gather(*asks)
    else:
        for ask in asks:
            await ask
    return time.perf_counter() - started_s


async def _one(server: Server, prompt: str) -> None:
    request = server.target.completion(prompt, ANSWER_TOKENS)
    answer = await (await send(server.target, request)).answer(MAX_RUN_S)
    check_answer(server.label, answer, len(prompt))  # a letter is a token


# --- the table -----------------------------------------------------------------------------------


def _rows(ours: Pairs, together: Sequence[float], apart: Sequence[float]) -> list[Row]:
    what = f"{len(PROMPT_TOKENS)} prompts of {', '.join(map(str, PROMPT_TOKENS))} tokens"
    counted = Row.lower_is_better(
        f"{what}, rows computed together", "tokens", together, ("one after another", apart)
    )
    expected = float(sum(PROMPT_TOKENS))
    exact = {*together, *apart} == {expected}
    timed = Row.lower_is_better(
        f"{what}, together", "s", ours.together, ("one after another", ours.apart)
    )
    most = 1 + ours.noise
    within = Goal(f"<= {most:.2f} times in pairs", ours.ratio <= most)
    return [counted.with_goal(Goal(f"exactly {expected:.0f}", exact)), timed.with_goal(within)]


def _peer_row(ours: Pairs, label: str, theirs: Pairs) -> Row:
    """One figure of each: their rounds are not ours."""
    name = "the same, together over one after another"
    return Row.lower_is_better(name, "times", [ours.ratio], (label, [theirs.ratio]))
