"""Several models in memory for one and a half, while clients ask for all of them.

Every request is answered by its model, or told when to come back. Now and then a model's process is
killed: its answers end with an error, and the next request has the model again. In the end nothing
is left: no process, no descriptor, no shared memory, and no more memory than after the first loads.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import psutil
from prometheus_client.parser import text_string_to_metric_families

from server.cli.models import Machine
from server.cli.serve_models import Disk, ModelOnDisk
from server.cli.settings import read_settings
from server.supervisor.process import Start
from tests.clients.servers import QUIRE, serving

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo" / "model"
MIB = 1024**2
NAMES = ("one", "two", "three")
CLIENTS = 4
PAUSE_S = 0.3
# Swaps between two kills, and before what is there is measured for the first time.
SWAPS_PER_KILL, FIRST_SWAPS = 20, 6
ANSWER_LIMIT_S = 120.0
REST_LIMIT_S = 60.0
GROWTH_LIMIT_RATIO = 0.05
CHAT = "/v1/chat/completions"
QUESTION = "What is a page table?"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class State:
    """What the server takes while one model is loaded and nobody asks."""

    front_bytes: int
    models_bytes: int
    descriptors: int
    processes: int
    shared_files: int


@dataclass
class Outcome:
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    loads: int = 0
    kills: int = 0


class Swaps:
    """The clients of one server."""

    def __init__(self, server: psutil.Process, http: httpx2.AsyncClient, seed: int) -> None:
        self._server = server
        self._http = http
        self._random = random.Random(seed)
        self._ended = asyncio.Event()
        self._killed = 0.0
        self.outcome = Outcome()

    async def run(self, swaps: int) -> Outcome:
        """Ask until models were loaded so often."""
        asking = [asyncio.create_task(self._ask_on()) for _ in range(CLIENTS)]
        await self._loads(min(FIRST_SWAPS, swaps))
        await self._rest(asking)
        asking = [asyncio.create_task(self._ask_on()) for _ in range(CLIENTS)]
        for goal in range(FIRST_SWAPS, swaps, SWAPS_PER_KILL):
            await self._loads(goal)
            self._kill()
        await self._loads(swaps)
        await self._rest(asking)
        return self.outcome

    async def _loads(self, goal: int) -> None:
        """Wait until models were loaded so often."""
        while self.outcome.loads < goal:
            await asyncio.sleep(PAUSE_S)
            page = (await self._http.get("/metrics")).text
            samples = (s for f in text_string_to_metric_families(page) for s in f.samples)
            found = [s.value for s in samples if s.name == "quire_model_loads_total"]
            self.outcome.loads = int(sum(found))

    async def _ask_on(self) -> None:
        while not self._ended.is_set():
            model = self._random.choice(NAMES)
            asked, stream = time.monotonic(), self._random.random() < 0.5
            ending = await self._ask(model, stream=stream)
            if ending == "model_ended" and self._killed < asked:
                self.outcome.problems.append(f"{model}: {ending}, and nobody killed it")
            self.outcome.answers[ending] += 1
            await asyncio.sleep(self._random.random() * PAUSE_S)

    async def _ask(self, model: str, *, stream: bool) -> str:
        """Return how a request ended: "answered", or the code of its error."""
        body = {
            "model": model,
            "stream": stream,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 16,
            "temperature": 0,
        }
        try:
            answer = await self._http.post(CHAT, json=body)
        except httpx2.RemoteProtocolError:
            return "model_ended"  # a whole answer that had begun
        if stream and answer.status_code == 200:
            lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            if lines[-1] == "data: [DONE]":
                return self._named(model, json.loads(lines[0][6:]))
            return str(json.loads(lines[-1][6:])["error"]["code"])
        found = answer.json()
        if answer.status_code == 200:
            return self._named(model, found)
        if answer.status_code != 503 or "retry-after" not in answer.headers:
            self.outcome.problems.append(f"{model}: {answer.status_code} {answer.text[:200]}")
        return str(found["error"]["code"])

    def _named(self, model: str, answer: dict[str, object]) -> str:
        if answer["model"] != model:
            self.outcome.problems.append(f"{model} was asked, and {answer['model']} answered")
        return "answered"

    def _kill(self) -> None:
        """Kill the process of a model, whatever it does."""
        children = self._server.children()
        if children:
            self._killed = time.monotonic() + 5.0
            os.kill(self._random.choice(children).pid, signal.SIGKILL)
            self.outcome.kills += 1

    async def _rest(self, asking: Sequence["asyncio.Task[None]"]) -> None:
        """Let the clients end, have one model loaded alone, and see what the server takes."""
        self._ended.set()
        await asyncio.gather(*asking)
        self._ended.clear()
        deadline = time.monotonic() + REST_LIMIT_S
        while await self._ask(NAMES[0], stream=False) != "answered" or len(self._models()) != 1:
            assert time.monotonic() < deadline, "models that nobody uses are not unloaded"
            # The others go for lack of room, one after the other.
            await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(3.0)  # idle memory goes back
        self.outcome.states.append(self._state())

    def _models(self) -> list[psutil.Process]:
        return [its for its in self._server.children() if its.status() != psutil.STATUS_ZOMBIE]

    def _state(self) -> State:
        models = self._models()
        return State(
            self._server.memory_full_info().uss,
            sum(model.memory_full_info().uss for model in models),
            self._server.num_fds(),
            len(models),
            len(list(SHARED_MEMORY.iterdir())) if SHARED_MEMORY.exists() else 0,
        )


def budget_for(folder: Path, models: float) -> int:
    """Return the memory for so many models."""
    settings = read_settings(None, {"models": {"folders": str(folder)}})
    (first, *_) = Disk([folder], NAMES[:1]).models()
    model = ModelOnDisk(first, Machine(settings, 1 << 40), Start((), folder, 0.0), int)
    return int(models * model.needs().least_bytes)


async def swap(swaps: int, seed: int) -> Outcome:
    """Serve three models, and ask for them."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for model in NAMES:
            shutil.copytree(DEMO, folder / model)
        settings = {
            "models.memory_budget": budget_for(folder, 1.5),
            "models.evict_after_idle_s": 0.2,
            "log.requests": False,
            "server.drain_s": 2,
        }
        arguments = [str(folder / model) for model in NAMES]
        for setting, value in settings.items():
            arguments += ["--set", f"{setting}={value}"]
        with serving(QUIRE, "serve", "--port", "0", *arguments) as server:
            process = psutil.Process(server.process.pid)
            async with httpx2.AsyncClient(base_url=server.url, timeout=ANSWER_LIMIT_S) as http:
                outcome = await Swaps(process, http, seed).run(swaps)
            children = process.children()
        left = [child.pid for child in children if child.is_running()]
        if left:
            outcome.problems.append(f"{len(left)} processes outlive the server")
    outcome.problems += grown(*outcome.states)
    return outcome


def grown(before: State, after: State) -> list[str]:
    """Return what there is more of than there was."""
    problems = []
    for name in ("front_bytes", "models_bytes"):
        was, now = getattr(before, name), getattr(after, name)
        if now > (1 + GROWTH_LIMIT_RATIO) * was:
            problems.append(f"{name}: {was / MIB:.1f} MiB before, {now / MIB:.1f} afterwards")
    # Connections that wait for the next request: of each client one to the front, and one further.
    for name, more in (("descriptors", 2 * CLIENTS), ("processes", 0), ("shared_files", 0)):
        was, now = getattr(before, name), getattr(after, name)
        if now > was + more:
            problems.append(f"{name}: {was} before, {now} afterwards")
    return problems


def report(outcome: Outcome) -> str:
    """Return what happened, as a person reads it."""
    answers = ", ".join(f"{count} {name}" for name, count in outcome.answers.most_common())
    lines = [f"{outcome.loads} loads, {outcome.kills} processes killed; {answers}"]
    for when, state in zip(("after the first", "after the last"), outcome.states, strict=True):
        lines.append(
            f"  {when}: front {state.front_bytes / MIB:.1f} MiB, one model "
            f"{state.models_bytes / MIB:.1f} MiB, {state.descriptors} descriptors, "
            f"{state.processes} process, {state.shared_files} files in shared memory"
        )
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in outcome.problems)])


def main() -> int:
    """Swap models; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=100, help="how often a model is loaded")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcome = asyncio.run(swap(options.swaps, options.seed))
    print(report(outcome))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
