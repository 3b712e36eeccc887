"""An engine of production parts on a simulated machine."""

from collections.abc import Callable
from random import Random

from engine.config import EngineConfig
from engine.step.loop import Emit, EngineLoop
from engine.step.scheduler import Scheduler
from engine.step.token_budget import TokenBudget
from kvcache.budget import CacheLimits
from kvcache.manager import KVCacheManager
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import StrictStates
from tests.kvcache.tier.workers import PlayedWorkers
from tests.simulation.disk import Disk
from tests.simulation.faults import DeviceFaults, SimulationError
from tests.simulation.recall import Foretelling, Recall
from tests.simulation.runner import Clock, SlotRunner
from tests.simulation.world import VOCAB, World


class Machine:
    """Everything below the clients."""

    def __init__(
        self,
        seed: int,
        world: World,
        emit: Emit,
        recall: Callable[[int], Recall],
        disk: Disk | None = None,
    ) -> None:
        """recall: the reference of a request."""
        self.clock = Clock()
        faults = MemoryFaults(
            Random(f"{seed} memory faults"),
            rate=world.refusal_rate,
            longest_storm=world.longest_storm,
            stuck_rate=world.stuck_rate,
            left=world.most_refusals,
        )
        self.memories = [
            _memory(seed, number, world, faults) for number in range(len(world.layout.groups))
        ]
        self.memory = self.memories[0]
        """All are of one kind, and share their faults."""
        config = EngineConfig(
            free_slack_bytes=world.free_slack_bytes,
            max_sharers=world.max_sharers,
            prefix_cache=world.shares_prefixes,
            idle_release_s=world.idle_release_s,
            prefix_keep_s=world.prefix_keep_s,
            overlap=world.overlap,
            max_step_mask_s=world.max_step_mask_s,
            grammar_bytes=0,
        )
        most = world.limits.max_num_seqs
        limits = CacheLimits(
            world.budget_bytes, most, 2 * most, config, world.max_num_batched_tokens
        )
        slot = world.layout.shape.slot
        self.states = None if slot is None else StrictStates(world.num_slots, slot, faults=faults)
        self.kv = KVCacheManager(
            world.layout, self.memories, limits, identity=b"simulated", states=self.states
        )
        self.faults = DeviceFaults(Random(f"{seed} device faults"), self.clock, world)
        self.runner = SlotRunner(
            self.kv,
            self.memories,
            self.states,
            self.clock,
            Random(f"{seed} device"),
            world,
            self.faults,
            recall,
            lambda seq_id: seq_id in self.scheduler._by_id,
            lambda seq_id: self.scheduler._by_id[seq_id].request.pooling,
        )
        most = world.max_num_batched_tokens
        budget = TokenBudget(world.step_target_s, world.min_budget_tokens, most, most)
        share, rng = world.mistaken_drafts, Random(f"{seed} drafts")
        drafter = None if share is None else Foretelling(recall, rng, share, VOCAB)
        self.scheduler = Scheduler(
            self.kv, world.limits, budget, most, world.max_step_mask_s, drafter
        )
        self.loop = EngineLoop(
            self.scheduler,
            self.kv,
            self.runner,
            config,
            emit=emit,
            clock=self.clock,
        )
        self.workers = PlayedWorkers()
        if disk is not None:
            disk.join(self)

    def check_returned(self) -> None:
        """Check that nothing is mapped, waits or leaks when all requests have ended."""
        stats = self.kv.stats()
        left = stats.live_bytes + stats.quarantined_bytes + stats.mapped_ahead_bytes
        left += stats.cached_bytes
        if left or stats.num_sequences or self.kv.recovering:
            raise SimulationError(f"something is left behind: {stats}")
        for memory in self.memories:
            if memory.mappings and memory.maps_while_running:
                raise SimulationError(f"still mapped: {sorted(memory.mappings)}")
        kept = self.memory.releases.keeps_heaps
        if not kept and stats.committed_bytes > sum(m.group.heap_bytes for m in self.memories):
            raise SimulationError(f"{stats.committed_bytes} bytes never went back")

    @property
    def begun(self) -> int:
        """Count the mappings that were begun."""
        return sum(memory.begun for memory in self.memories)

    @property
    def disk_hangs(self) -> bool:
        """Return whether a transfer has had memory for longer than anybody waits for it."""
        tier = self.kv._tier
        moves = tier is not None and bool(tier._running or tier._writing)
        return moves and tier is not None and not tier.recovering

    @property
    def unfriendly(self) -> bool:
        """Return whether memory was refused, or may be."""
        return any(memory.unfriendly for memory in self.memories)


def _memory(seed: int, number: int, world: World, faults: MemoryFaults) -> StrictMemory:
    """number: of the group."""
    return StrictMemory(
        world.layout.groups[number],
        at_once=False,
        slowness=world.slowness,
        holds_contents=True,
        faults=faults,
        rng=Random(f"{seed} memory {number}"),
        **world.manners.fields,
        mapping_limit=world.mapping_limit,
        shares_blocks=world.shares_blocks,
        heap_limit=world.heap_limit,
        maps_while_running=world.maps_while_running,
        max_sharers=world.max_sharers,
    )
