"""Deliberate bugs, to be planted one at a time: what the simulator is worth.

Each is one replacement in a copy of engine/ and kvcache/. The simulator then runs in a process of
its own that imports the copy, until a seed fails.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "kvcache")
HUNT_LIMIT_S = 300.0
# The installed project has a finder that would win against any path.
PROGRAM = """
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)
from tests.simulation.mutants import hunt_here
hunt_here(int(sys.argv[1]), int(sys.argv[2]), states=sys.argv[3] == "True")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug."""

    what: str
    file: str
    right: str
    """Stands in the file exactly once."""
    wrong: str
    in_hour_of_mac: bool = False
    """Whether an hour of a Mac is run instead of seeds."""
    has_states: bool = False
    """Whether the model has recurrent layers."""
    first_seed: int = 0
    """Where the hunt begins: with the first one that catches it, where dozens do not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a hunt found."""

    seeds: int
    """How many were run."""
    reason: str | None
    """Why the last one failed; None when none did."""


# Where prefixes are dropped as long as nobody is let in.
ALL_ALONG = "            if self._scheduler.holds_back and self._kv.releases_memory:\n"
MUTANTS = (
    Mutant(
        "a buffer is unmapped while a step still reads it",
        "kvcache/group_cache.py",
        "closed.epoch <= completed_epoch and",
        "closed.epoch <= completed_epoch + 2 and",
    ),
    Mutant(
        "a buffer is used again before it is unmapped",
        "kvcache/group_cache.py",
        "(closed.ticket is None or closed.ticket > done)",
        "closed.ticket is None",
    ),
    Mutant(
        "a fork does not copy the partial block",
        "kvcache/manager.py",
        "                group.backend.copy_block(source, whole, target, whole, partial)\n",
        "",
    ),
    Mutant(
        "a fork copies one token too few",
        "kvcache/manager.py",
        "target, whole, partial)",
        "target, whole, partial - 1)",
    ),
    Mutant(
        "a block is sealed before the step that fills it has completed",
        "kvcache/manager.py",
        "group.prefixes.filled(epoch,",
        "group.prefixes.filled(self._completed_epoch,",
    ),
    Mutant(
        "a block is sealed one token too early",
        "kvcache/manager.py",
        "in range(start // size, end // size):",
        "in range(start // size, (end + 1) // size):",
    ),
    Mutant(
        "the last block of a sequence is forgotten",
        "kvcache/layout.py",
        "return -(-tokens // self.tokens_per_block)",
        "return tokens // self.tokens_per_block",
    ),
    Mutant(
        "one who shares a block is not counted",
        "kvcache/heap_pool.py",
        "        block.buffers += 1\n        block.sequences += 1\n",
        "        block.sequences += 1\n",
    ),
    Mutant(
        "whoever leaves first takes shared blocks along",
        "kvcache/heap_pool.py",
        "            if block.sequences:\n",
        "            if block.sequences and block.state is BlockState.QUARANTINED:\n",
    ),
    Mutant(
        "memory that is on its way back is handed out",
        "kvcache/heap_pool.py",
        "if item.ticket > completed_ticket:",
        "if item.ticket > completed_ticket + 1:",
    ),
    Mutant(
        "heaps that must be kept are released",
        "kvcache/heap_pool.py",
        "return releases_any and self.free_committed_bytes > kept_bytes",
        "return self.free_committed_bytes > kept_bytes",
    ),
    Mutant(
        "reserved blocks are given to others",
        "kvcache/block_allocator.py",
        "if missing - sequence.reserved_blocks > self.available_blocks:",
        "if missing > self._pool.free_blocks:",
    ),
    Mutant(
        "shared blocks are mapped writable",
        "kvcache/block_allocator.py",
        "self._buffers.map(sequence.buffer, blocks, writable=False)",
        "self._buffers.map(sequence.buffer, blocks, writable=True)",
    ),
    Mutant(
        "memory is mapped beside steps",
        "kvcache/block_allocator.py",
        "return self._maps_while_running or self.is_at_mapping_point",
        "return True",
    ),
    Mutant(
        "a step is begun before its mappings are done",
        "kvcache/manager.py",
        "                group.allocator.top_up(part, start + count)\n"
        "        self._finish_mappings()\n",
        "                group.allocator.top_up(part, start + count)\n",
    ),
    Mutant(
        "a block that another buffer still maps is given away",
        "kvcache/heap_pool.py",
        "        if not block.keepers:\n            self._note_takeable(block, is_free)\n",
        "        self._note_takeable(block, is_free)\n",
    ),
    Mutant(
        "what was sealed is written through the mapping that is kept",
        "kvcache/sparse_buffer.py",
        " and len(b.keepers) == 1 and not b.is_sealed",
        " and len(b.keepers) == 1",
    ),
    Mutant(
        "a kept block is taken for another one",
        "kvcache/sparse_buffer.py",
        "takewhile(lambda pair: pair[0] is pair[1], zip(",
        "takewhile(lambda pair: pair[0].state is pair[1].state, zip(",
    ),
    Mutant(
        "a heap's memory is not asked for",
        "kvcache/heap_pool.py",
        "or self._backend.commit_heap(block.heap)",
        "or True",
    ),
    Mutant(
        "blocks that the system refused to map ahead count as mapped",
        "kvcache/buffer_pool.py",
        "refused = self._backend.refused(item.ticket)",
        "refused = self._backend.refused(item.ticket) and place < 0",
    ),
    Mutant(
        "nobody waits for blocks that are being mapped ahead",
        "kvcache/manager.py",
        "if num_tokens <= part.mapped_tokens:",
        "if num_tokens <= part.table_tokens:",
    ),
    Mutant(
        "mappings are not counted when blocks are mapped ahead",
        "kvcache/buffer_pool.py",
        "        if limit is not None and self._mappings > limit:\n",
        "        if limit is not None and before > limit:\n",
    ),
    Mutant(
        "a block has one buffer more than it may",
        "kvcache/prefix_cache.py",
        "return block.buffers >= self._max_sharers",
        "return block.buffers > self._max_sharers",
    ),
    Mutant(
        "what a failed request wrote is shared",
        "engine/scheduler.py",
        "keep_prefix=reason is not FinishReason.ERROR)",
        "keep_prefix=True)",
        first_seed=25,
    ),
    Mutant(
        "a block that sequences use is evicted",
        "kvcache/prefix_index.py",
        "unused = block.state is BlockState.CACHED\n",
        "unused = True\n",
    ),
    Mutant(
        "a prompt finds its very last token in the cache",
        "kvcache/block_hashes.py",
        "limit = self.num_tokens - 1 if limit is None",
        "limit = self.num_tokens if limit is None",
    ),
    Mutant(
        "the tenant's salt is ignored",
        "kvcache/block_hashes.py",
        "self._root = _root(identity, salt.tenant, salt.client)",
        "self._root = _root(identity, b'', salt.client)",
        first_seed=25,
    ),
    Mutant(
        "a block is found by its own tokens, whatever came before",
        "kvcache/block_hashes.py",
        "self.digests.append(sha256(self.parent(len(self.digests)) + tokens).digest())",
        "self.digests.append(sha256(self._root + tokens).digest())",
    ),
    Mutant(
        "a preempted sequence loses its last token",
        "engine/scheduler.py",
        "        sequence.preemptions += 1\n",
        "        sequence.preemptions += 1\n"
        "        del sequence.token_ids[max(sequence.num_prompt, sequence.num_tokens - 1) :]\n",
    ),
    Mutant(
        "a preempted sequence believes that it still has its memory",
        "engine/scheduler.py",
        "        sequence.progress = progress\n",
        "        sequence.progress = sequence.progress if sequence.preemptions else progress\n",
        first_seed=33,
    ),
    Mutant(
        "the first in order is preempted",
        "engine/scheduler.py",
        "sequence = self._running.pop()",
        "sequence = self._running.pop(0)",
    ),
    Mutant(
        "a prompt of one token is not told what it shares",
        "engine/scheduler.py",
        "decoding = tokens - start == 1 and sequence.prefix is not None",
        "decoding = tokens - start == 1",
    ),
    Mutant(
        "an answer has one token too many",
        "engine/sequence.py",
        "elif len(tokens) >= sequence.max_tokens:",
        "elif len(tokens) > sequence.max_tokens:",
    ),
    Mutant(
        "sampled tokens go to the wrong requests",
        "engine/scheduler.py",
        "rest = iter(outcomes)",
        "rest = iter(outcomes[::-1])",
    ),
    Mutant(
        "one request of a failed step lives on",
        "engine/scheduler.py",
        "for sequence in left]\n",
        "for sequence in left[1:]]\n",
    ),
    Mutant(
        "nobody gives way when nothing can run",
        "engine/scheduler.py",
        "        if self.kv.recovering:\n            return ()\n        if len",
        "        if self.kv.recovering or self._running:\n            return ()\n        if len",
        first_seed=231,
    ),
    Mutant(
        "a prompt that is to be scored takes over what others have",
        "engine/scheduler.py",
        "        sequence.block_hashes.max_cached_tokens = sequence.num_reusable\n",
        "",
    ),
    Mutant(
        "a fork that is to be scored takes its parent's prompt",
        "engine/scheduler.py",
        "number = child.request.fork_of if child.num_reusable is None else None",
        "number = child.request.fork_of",
    ),
    Mutant(
        "what has been scored is scored again after a preemption",
        "engine/sequence.py",
        "first = max(sequence.num_scheduled, len(sequence.scored))",
        "first = sequence.num_scheduled",
    ),
    Mutant(
        "what a step in flight scores is scored again",
        "engine/sequence.py",
        "first = max(sequence.num_scheduled, len(sequence.scored))",
        "first = max(sequence.num_computed, len(sequence.scored))",
    ),
    Mutant(
        "scores of chunks are not kept",
        "engine/sequence.py",
        "        sequence.scored += outcome.logprobs\n",
        "        sequence.scored += outcome.logprobs if outcome.then else ()\n",
    ),
    Mutant(
        "a token follows a prompt of which only scores are wanted",
        "engine/sequence.py",
        "        if params.max_tokens == 0:\n",
        "        if params.max_tokens < 0:\n",
    ),
    Mutant(
        "the end of an aborted request is not said",
        "engine/loop.py",
        "events += self._scheduler.abort(message.request_id)",
        "self._scheduler.abort(message.request_id)",
    ),
    Mutant(
        "somebody is let in although the system is short of memory",
        "engine/scheduler.py",
        "max_running = 1 if self.holds_back else self.limits.max_num_seqs",
        "max_running = self.limits.max_num_seqs",
    ),
    Mutant(
        "nobody is let in while the system is short of memory",
        "engine/scheduler.py",
        "max_running = 1 if self.holds_back else self.limits.max_num_seqs",
        "max_running = 0 if self.holds_back else self.limits.max_num_seqs",
    ),
    Mutant(
        "prefixes are dropped at a warning although nothing is released",
        "engine/loop.py",
        "        if self._scheduler.holds_back and self._kv.releases_memory:\n"
        "            self._kv.evict_prefixes()\n        if self",
        "        if level > PressureLevel.NORMAL:\n"
        "            self._kv.evict_prefixes()\n        if self",
        first_seed=164,
    ),
    Mutant(
        "prefixes are dropped all along although nothing is released",
        "engine/loop.py",
        ALL_ALONG,
        "            if self._scheduler.holds_back:\n",
        first_seed=164,
    ),
    Mutant(
        "a warning lets one in at a time although nothing is released",
        "engine/loop.py",
        "PressureLevel.WARNING if self._kv.releases_memory else PressureLevel.CRITICAL",
        "PressureLevel.WARNING",
        first_seed=35,
    ),
    Mutant(
        "a budget from what is available",
        "kvcache/memory_budget.py",
        "return left if on_gpu else min(left, available_bytes)",
        "return min(left, available_bytes)",
        in_hour_of_mac=True,
    ),
    Mutant(
        "prefixes of a Mac that warns are dropped all along although nothing is released",
        "engine/loop.py",
        ALL_ALONG,
        "            if self._scheduler.holds_back or self._kv._first.allocator.spares_heaps:\n",
        in_hour_of_mac=True,
    ),
    Mutant(
        "a Mac that warns answers one after the other",
        "engine/loop.py",
        "PressureLevel.WARNING if self._kv.releases_memory else PressureLevel.CRITICAL",
        "PressureLevel.WARNING",
        in_hour_of_mac=True,
    ),
    Mutant(
        "a Mac that warns makes no heap while there is a prefix to evict",
        "kvcache/block_allocator.py",
        "if is_large and missing",
        "if missing",
        in_hour_of_mac=True,
    ),
    Mutant(
        "a Mac that warns makes no heap at all",
        "kvcache/block_allocator.py",
        "        while (taken := self._pool.allocate(count, after)) is None:\n",
        "        while self.spares_heaps and count > self._pool.count(BlockState.FREE):\n"
        "            if not self._prefixes.evict():\n                return None\n"
        "        while (taken := self._pool.allocate(count, after)) is None:\n",
        in_hour_of_mac=True,
    ),
    Mutant(
        "a model that computes nothing any more serves on",
        "engine/loop.py",
        "if event.message == NOT_FINITE.message:",
        "if event.message == '':",
        first_seed=73,
    ),
    Mutant(
        "the engine's own request is told to clients",
        "engine/loop.py",
        "return [event for event in events if event.request_id != HEALTH_CHECK_ID]",
        "return events",
    ),
    Mutant(
        "a closed sequence does not wait for the step in flight",
        "kvcache/manager.py",
        "group.close(part, self._issued_epoch)",
        "group.close(part, self._issued_epoch - 1)",
    ),
    Mutant(
        "the rows of one that has ended are committed",
        "engine/scheduler.py",
        "                self.counters.wasted_rows += outcome is not None\n"
        "                continue\n",
        "                self.counters.wasted_rows += outcome is not None\n"
        "                self.kv.commit(entry.seq_id, [])\n                continue\n",
    ),
    Mutant(
        "the result of one that has ended goes to the next one",
        "engine/scheduler.py",
        "            outcome = next(rest) if entry.has_outcome else None\n"
        "            sequence = self._by_id.get(entry.seq_id)\n",
        "            sequence = self._by_id.get(entry.seq_id)\n"
        "            outcome = next(rest) if sequence and entry.has_outcome else None\n",
    ),
    Mutant(
        "a row is computed for one whose end can be seen coming",
        "engine/scheduler.py",
        "sequence.num_output_placeholders += stop + 1 < sequence.max_tokens",
        "sequence.num_output_placeholders += 1",
    ),
    Mutant(
        "somebody in flight loses its memory",
        "engine/scheduler.py",
        "            elif overlapped and (self.kv.wants_mapping_point or not self.kv.recovering):\n"
        "                return [], True\n",
        "            elif overlapped and len(self._running) > 1:\n"
        "                self._preempt_youngest()\n",
    ),
    Mutant(
        "a step that read what a failed one wrote is read as well",
        "engine/pipeline.py",
        "return [*self._cancel_later_steps(), FailedStep(launched.plan)]",
        "return [FailedStep(launched.plan)]",
        first_seed=30,
    ),
    Mutant(
        "tokens are chosen before those that they depend on are known",
        "engine/loop.py",
        "        events += self._commit(retired)\n        state = self._begin_state(plan)\n",
        "        state = self._begin_state(plan)\n        events += self._commit(retired)\n",
    ),
    Mutant(
        "nobody waits for constraints where others have penalties",
        "engine/sequence.py",
        "self.request.constraint is not None or params.penalises",
        "params.penalises",
    ),
    Mutant(
        "stop tokens are held back only where somebody has to wait anyway",
        "engine/sequence.py",
        "needs_state = sequence.needs_state or params.holds_back_stops(num_generated)",
        "needs_state = sequence.needs_state",
    ),
    Mutant(
        "the rows behind one that has ended get each other's masks",
        "engine/scheduler.py",
        "        return rows\n",
        "        return sorted(rows, key=lambda sequence: sequence is None)\n",
    ),
    Mutant(
        "the token that a penalty counts next is forgotten",
        "engine/sequence.py",
        "        self.counts.update(self.token_ids, self.num_prompt)\n",
        "        self.counts.update(self.token_ids[:-1], self.num_prompt)\n",
    ),
    Mutant(
        "a mask that could not be made ends nobody",
        "engine/constraints.py",
        "            broken[number] = _why(sequence, error)\n",
        "            _why(sequence, error)\n",
    ),
    Mutant(
        "a step whose tokens could not be chosen is read",
        "engine/pipeline.py",
        "            self._note_failure(error)\n            launched.step = None\n",
        "            self._note_failure(error)\n",
    ),
    Mutant(
        "a fork takes blocks that follow others than its own",
        "kvcache/group_cache.py",
        "if blocks and parents[: len(own)] != own:",
        "if False:",
        first_seed=139,
    ),
    Mutant(
        "a step in flight is never read when nothing follows",
        "engine/loop.py",
        "self._pipeline.retire(1 if plan.entries else 0)",
        "self._pipeline.retire(1)",
    ),
    Mutant(
        "a slow reader is never cut",
        "engine/client.py",
        "if len(self._events) >= self._max_backlog:",
        "if len(self._events) >= self._max_backlog + 20:",
    ),
    Mutant(
        "a sequence goes on from the state of another position",
        "kvcache/state_cache.py",
        "        for number in range(len(blocks), 0, -1):\n"
        "            prefix = blocks[number - 1].prefix\n"
        "            if prefix is not None and prefix.cell is not None:\n"
        "                return number\n"
        "        return 0\n",
        "        return len(blocks)\n",
        has_states=True,
    ),
    Mutant(
        "a state is restored at the wrong position",
        "kvcache/state_cache.py",
        "        cell = blocks[-1].found_by.cell\n",
        "        cell = next(b.found_by.cell for b in blocks if b.found_by.cell)\n",
        has_states=True,
    ),
    Mutant(
        "a sealed cell is written",
        "kvcache/state_cache.py",
        "                states.working = states.spare.pop()\n",
        "                states.working = states.base or states.spare.pop()\n",
        has_states=True,
    ),
    Mutant(
        "a step writes where it has read a sealed state",
        "kvcache/state_cache.py",
        "            writes.append((count, states.working))\n",
        "            writes.append((count, states.base or states.working))\n",
        has_states=True,
    ),
    Mutant(
        "a step that was dropped has advanced the state",
        "kvcache/manager.py",
        "            sequence.progress.restart_at(self._states.cancel_steps(seq_id))\n",
        "            self._states._open[seq_id].steps.clear()\n",
        has_states=True,
        first_seed=58,
    ),
    Mutant(
        "the rows of a convolution are forgotten",
        "kvcache/layout.py",
        "return self.matrix_bytes + self.tail_rows * self.tail_width * self.format.itemsize",
        "return self.matrix_bytes",
        has_states=True,
    ),
    Mutant(
        "a cell that a sequence goes on from is evicted",
        "kvcache/cell_pool.py",
        "return self.prefix is not None and not self.holders",
        "return self.prefix is not None",
        has_states=True,
    ),
    Mutant(
        "a state that a failed sequence wrote is found",
        "kvcache/state_cache.py",
        "if not item.sequence.keeps_prefix or block is None:",
        "if block is None:",
        has_states=True,
    ),
    Mutant(
        "the state that a sequence ends with is forgotten",
        "kvcache/state_cache.py",
        "                self._seal_later(states, Keep.END, epoch)\n",
        "                self.pool.hold(states.base)\n",
        has_states=True,
    ),
    Mutant(
        "a cell leaks when its sequence ends",
        "kvcache/state_cache.py",
        "        for cell in states.spare:\n            self.pool.let_go(cell)\n        if",
        "        if",
        has_states=True,
        first_seed=543,
    ),
    Mutant(
        "the cell that a sequence works in leaks when it ends",
        "kvcache/state_cache.py",
        "            self.pool.let_go(states.working)\n            states.working = None\n",
        "            states.working = None\n",
        has_states=True,
    ),
    Mutant(
        "a cell is handed out again while a step may touch it",
        "kvcache/cell_pool.py",
        "            done = cell.epoch <= self._completed_epoch\n",
        "            done = True\n",
        has_states=True,
    ),
    Mutant(
        "a cell stays behind when its block is evicted",
        "kvcache/prefix_index.py",
        "            self.cells.forget(prefix.cell, evicted=evicted)\n",
        "            pass\n",
        has_states=True,
    ),
    Mutant(
        "the boundary that a step crosses is not written down",
        "kvcache/state_cache.py",
        "writes = [(block * self._size - start, cell) for block, cell in crossed]",
        "writes = [(block * self._size - start, cell) for block, cell in crossed[-1:]]",
        has_states=True,
    ),
    Mutant(
        "sequences are admitted beyond what cells there are",
        "kvcache/state_cache.py",
        "CELLS_PER_SEQUENCE * (len(self._open) + 1) <= self.pool.capacity",
        "len(self._open) < self.pool.capacity",
        has_states=True,
    ),
)


def plant(mutant: Mutant | None, directory: Path) -> None:
    """Copies the packages, and puts the bug into the copy."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, directory / package, ignore=ignored)
    if mutant is None:
        return
    path = directory / mutant.file
    text = path.read_text()
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.file} holds {text.count(mutant.right)} times: {mutant.right!r}")
    path.write_text(text.replace(mutant.right, mutant.wrong))


def hunt(directory: Path, seeds: int, first: int = 0, *, states: bool = False) -> Verdict:
    """Runs so many seeds over the packages in the directory until one fails, in a process of its
    own; or, where there are none, an hour of a Mac. states: whether layers are recurrent."""
    paths = os.pathsep.join([str(directory), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seeds), str(first), str(states)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=HUNT_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the hunt was broken off:\n{done.stderr}")
    found = json.loads(done.stdout)
    strangers = [path for path in found["modules"] if not path.startswith(str(directory))]
    if strangers:
        raise RuntimeError(f"not the copy was run: {strangers}")
    return Verdict(found["seeds"], found["reason"])


def hunt_here(seeds: int, first: int, *, states: bool) -> None:
    """The process's side: writes the verdict as JSON."""
    from tests.simulation.seeds import run_seeds  # the copy must not be imported before it is there

    reason, number = None if seeds else _reason_of_mac(), 0
    while number < seeds and reason is None:
        _, failures = run_seeds([first + number], states=states)
        reason = failures[0].reason if failures else None
        number += 1
    packages = {name: module for name, module in sys.modules.items() if "." in name}
    modules = [m.__file__ for name, m in packages.items() if name.split(".")[0] in PACKAGES]
    json.dump({"seeds": number, "reason": reason, "modules": modules}, sys.stdout)


def _reason_of_mac() -> str | None:
    """What is wrong with an hour of a Mac; None where nothing is."""
    from kvcache.memory_budget import BudgetError
    from tests.simulation.faults import SimulationError
    from tests.simulation.mac import mac_hour
    from tests.simulation.trace import SeedFailedError

    try:
        mac_hour()
    except SeedFailedError as error:
        return error.reason
    except (BudgetError, SimulationError) as error:
        return str(error)
    return None
