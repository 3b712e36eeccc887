"""The switches of a seed: what is different from a calm machine with one client at a time.

A feature of the engine is a row: its name, its values, and what it changes of the world. Each is
drawn by itself, so that a seed's other switches stay as they are when one is added or turned.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from engine.types import PrefixSalt
from kvcache.slots import SLOTS_PER_SEQUENCE
from tests.kvcache.strict_memory import Manners
from tests.kvcache.strict_states import STATES
from tests.simulation.world import World, draw_sizes, layout_of

# The values of a seed's switches, by name.
Settings = Mapping[str, Any]
Turn = Callable[[World, Any, Random], World]


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    values: Sequence[Any]
    """Each is as likely as the others. The first one is off."""
    changes: str | Turn
    """The field of the world that has the value, or what is done for a value that is not off."""

    def turn(self, world: World, value: Any, rng: Random) -> World:
        if isinstance(self.changes, str):
            return replace(world, **{self.changes: value})
        return self.changes(world, value, rng)


def one_in(count: int, value: Any = True, off: Any = False) -> tuple[Any, ...]:
    return (*(off,) * (count - 1), value)


# --- what a switch changes ------------------------------------------------------------------------


def _dense(world: World, _: bool, __: Random) -> World:
    layout = layout_of(1, world.max_model_len, world.max_model_len, 1)
    world = replace(world, layout=layout, shares_blocks=False)
    return replace(world, heaps=world.heaps_for(1))


def _groups(world: World, count: int, _: Random) -> World:
    group = world.layout.groups[0]
    tokens, heap_blocks = group.tokens_per_block, group.blocks_per_heap
    return replace(world, layout=layout_of(count, tokens, world.max_model_len, heap_blocks))


def _windows(world: World, blocks: float, rng: Random) -> World:
    """Add a layer whose window has about this many blocks."""
    group, count = world.layout.groups[0], len(world.layout.groups)
    tokens, heap_blocks = group.tokens_per_block, group.blocks_per_heap
    window = round(blocks * tokens) + rng.randint(1, 3)
    layout = layout_of(count, tokens, world.max_model_len, heap_blocks, window)
    return replace(world, layout=layout)


def _company(world: World, most: int, _: Random) -> World:
    return replace(world, max_num_seqs=most, heaps=world.heaps_for(most))


def _little_room(world: World, sequences: float, _: Random) -> World:
    return replace(world, heaps=world.heaps_for(min(sequences, world.max_num_seqs)))


def _states(world: World, _: bool, rng: Random) -> World:
    """Add a recurrent layer, and slots for one sequence at least."""
    shape = replace(world.layout.shape, states=STATES)
    few = SLOTS_PER_SEQUENCE + rng.randrange(3)
    many = max(few, SLOTS_PER_SEQUENCE * world.max_num_seqs) + rng.randrange(20)
    num_slots = rng.choice((few, rng.randint(few, many), many))
    return replace(world, layout=replace(world.layout, shape=shape), num_slots=num_slots)


def _head(world: World, _: bool, __: Random) -> World:
    """Give the model a head for drafts, which needs the hidden states before each step. A
    whole number of them is as long as two of float32."""
    shape = replace(world.layout.shape, hidden_size=2)
    return replace(world, layout=replace(world.layout, shape=shape))


def _chunks(world: World, most: int, rng: Random) -> World:
    return replace(world, max_num_batched_tokens=most, min_budget_tokens=rng.randint(1, most))


def _rings(world: World, _: bool, __: Random) -> World:
    """Give sequences as few addresses as there can be behind windows."""
    step = world.max_num_batched_tokens
    groups = (g.with_ring(step) if g.window else g for g in world.layout.groups)
    return replace(world, layout=replace(world.layout, groups=tuple(groups)))


def _slack(world: World, part: float, _: Random) -> World:
    heaps = round(part * world.heaps)
    return replace(world, free_slack_bytes=heaps * world.layout.groups[0].heap_bytes)


def _refusals(world: World, rate: float, rng: Random) -> World:
    storm, most = rng.choice((1, 3, 12)), rng.randint(1, 60)
    return replace(world, refusal_rate=rate, longest_storm=storm, most_refusals=most)


def _mapping_limit(world: World, part: float, _: Random) -> World:
    # A sequence of single blocks takes one mapping per region and block, and the gap behind them.
    group = world.layout.groups[0]
    longest = len(group.regions) * (group.blocks_per_buffer + 1)
    return replace(world, mapping_limit=round(part * longest))


def _heap_limit(world: World, _: bool, __: Random) -> World:
    return replace(world, heap_limit=world.heaps)


def _mapping_points(world: World, manners: Manners, _: Random) -> World:
    """Memory is mapped where no step is in flight, as on a GPU; it has no limit of mappings."""
    if not world.shares_blocks:
        return world
    return replace(world, maps_while_running=False, mapping_limit=None, manners=manners)


def _disk(world: World, rate: float, rng: Random) -> World:
    """Keep prefixes of most clients on disk, and restart the engine."""
    if not (world.shares_prefixes and world.shares_blocks):
        return world
    salts = (replace(salt, may_be_written=rng.random() < 0.9) for salt in world.salts)
    return replace(world, disk_fault_rate=rate, salts=tuple(salts))


def _tenants(world: World, count: int, _: Random) -> World:
    tenants = (
        PrefixSalt(b"a"),
        PrefixSalt(b"a", b"own"),
        PrefixSalt(b"b"),
        PrefixSalt(b"b", b"own"),
    )
    return replace(world, salts=tenants[:count])


MANNERS = (Manners.BLOCKS,) * 10 + (Manners.HEAPS,) * 2 + (Manners.NOTHING,) * 2
# In this order: a switch may go by what those before it have changed.
SWITCHES = (
    # The cache.
    Switch("dense", one_in(12), _dense),
    Switch("groups", (1, 1, 1, 2), _groups),
    Switch("windows", (None, None, None, 0.0, 0.4, 1.0, 1.4, 2.0, 5.0), _windows),
    Switch("company", (1, 2, 3, 4, 4, 6, 8), _company),
    Switch("little-room", (1000.0, 1.0, 1.0, 1.3, 1.6, 2.0), _little_room),
    Switch("states", (False, True), _states),
    Switch("head", (False, True), _head),
    Switch("prefixes", (False, *(True,) * 9), "shares_prefixes"),
    Switch("sharers", (1000, 1000, 2, 3), "max_sharers"),
    Switch("slack", (0.0, 0.3, 1.0), _slack),
    Switch("idle-release", (1.0, 0.05, 0.0), "idle_release_s"),
    Switch("prefix-keep", (1000.0, 10.0, 0.2, 0.0), "prefix_keep_s"),
    # The steps.
    Switch("chunks", (1024, 1, 3, 8, 16, 40, 64), _chunks),
    Switch("rings", (False, True), _rings),
    Switch("overlap", (False, True, True, True), "overlap"),
    Switch("lag", (0, 1, 1, 2, 4), "longest_lag"),
    Switch("drafts", (None, None, 1.0, 0.0, 0.3), "mistaken_drafts"),
    # The memory.
    Switch("slow-memory", (0.0, 0.3, 0.7, 0.9), "slowness"),
    Switch("refusals", (0.0, 0.0, 0.0, 0.01, 0.05, 0.2), _refusals),
    Switch("stuck-memory", one_in(33, 0.2, 0.0), "stuck_rate"),
    Switch("manners", (*MANNERS, Manners.IDLE, Manners.ARENA), "manners"),
    Switch("mapping-limit", (*(None,) * 16, 0.7, 1.0, 1.7, 3.0), _mapping_limit),
    Switch("heap-limit", one_in(10), _heap_limit),
    Switch("mapping-points", (None,) * 3 + (Manners.IDLE, Manners.NOTHING), _mapping_points),
    Switch("pressure", (0.0, 0.0, 0.01, 0.2), "pressure_rate"),
    Switch("other-models", (0.0, 0.0, 0.01, 0.2), "limit_rate"),
    # The device.
    Switch("failed-steps", (0.0, 0.0, 0.02, 0.1), "failure_rate"),
    Switch("fatal-failures", one_in(20), "failures_end_engine"),
    Switch("bad-rows", (0.0, 0.0, 0.0, 0.02, 0.2), "bad_row_rate"),
    Switch("broken-model", one_in(50), "model_is_broken"),
    # The requests.
    Switch("turns", (0.0, 0.2, 0.5), "turn_rate"),
    Switch("repeats", (0.0, 0.1, 0.5), "repeat_rate"),
    Switch("forks", (0.0, 0.1, 0.3), "fork_rate"),
    Switch("tenants", (0, 0, 1, 2, 3, 4), _tenants),
    Switch("disk", (None, None, 0.001, 0.05, 0.0), _disk),
    Switch("priorities", (0.0, 0.0, 0.2), "priority_rate"),
    Switch("scores", (0.0, 0.3, 0.8), "scoring_rate"),
    Switch("vectors", (0.0, 0.0, 0.3), "pooling_rate"),
    Switch("grammars", (0.0, 0.2, 0.5), "grammar_rate"),
    Switch("penalties", (0.0, 0.0, 0.3), "penalty_rate"),
    # Any mask takes longer, so that only one sequence with a grammar goes on at a time.
    Switch("mask-turns", (math.inf, 1e-12, 1e-12), "max_step_mask_s"),
    Switch("stop-ids", (0.0, 0.5), "stop_id_rate"),
    Switch("min-tokens", (0.0, 0.0, 0.3), "min_tokens_rate"),
    # The readers.
    Switch("aborts", (0.0, 0.1, 0.2), "abort_rate"),
    Switch("stop-strings", (0.0, 0.0, 0.1), "stop_string_rate"),
    Switch("slow-readers", (0.0, 0.0, 0.2), "slow_reader_rate"),
    Switch("backlog", (8, 3, 1), "max_backlog"),
    Switch("late-delivery", (0.0, 0.5), "late_delivery_rate"),
)
OFF: Settings = {switch.name: switch.values[0] for switch in SWITCHES}


def draw_settings(seed: int) -> Settings:
    return {s.name: Random(f"{seed} {s.name}").choice(s.values) for s in SWITCHES}


def turned_on(settings: Settings) -> Settings:
    return {name: value for name, value in settings.items() if value != OFF[name]}


def make_world(seed: int, settings: Settings) -> World:
    """Return the seed's sizes with the switches turned that are not off."""
    world = draw_sizes(Random(f"{seed} sizes"))
    for switch in SWITCHES:
        if (value := settings[switch.name]) != OFF[switch.name]:
            world = switch.turn(world, value, Random(f"{seed} {switch.name} turned"))
    return world


def smallest(settings: Settings, fails: Callable[[Settings], bool]) -> Settings:
    """Return switches with which the seed fails, and of which none can be turned off."""
    needed = dict(turned_on(settings))
    for name, value in list(needed.items()):
        del needed[name]
        if not fails({**OFF, **needed}):
            needed[name] = value
    return needed


def as_options(settings: Settings) -> str:
    """Return the options of the command that turn these on."""
    return " ".join(f"--{name} {_text(value)}" for name, value in settings.items())


def parse(switch: Switch, text: str) -> Any:
    """Return the value that an option gives. Raises ValueError."""
    values = {_text(value): value for value in switch.values}
    if text not in values:
        raise ValueError(f"{text} is none of {', '.join(values)}")
    return values[text]


def _text(value: Any) -> str:
    return value.name.lower() if isinstance(value, Manners) else str(value).lower()
