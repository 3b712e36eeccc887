"""The board *memory*: bytes of K and V, shared blocks, and the rest of the machine's memory."""

from panels import CHOSEN, CRITICAL, WARNING, Board, Panel, Query, Row, increase, rate, value

USES = {
    "live": "green",
    "partial_tail": "yellow",
    "mapped_ahead": "orange",
    "cached": "blue",
    "quarantined": "purple",
    "free": "#808080",
}
COMMITTED = value("quire_kv_committed_bytes")
LIVE = value("quire_kv_live_bytes")
OPEN = "live|partial_tail|mapped_ahead"
FOOTPRINT = value("quire_process_footprint_bytes")
SYSTEM = f"max (quire_system_memory_total_bytes{{{CHOSEN}}})"


def recorded(rule: str) -> str:
    """Return a panel's query for a recorded ratio: the highest of the instances."""
    return f"max (quire:{rule}{{{CHOSEN}}})"


NOW = Row(
    "Now",
    [
        Panel(
            "Budget", "What K and V may take.", "bytes",
            [Query(value("quire_kv_capacity_bytes"), "budget")], kind="stat", width=4, height=4,
        ),
        Panel(
            "Committed", "What the system charges for K and V.", "bytes",
            [Query(COMMITTED, "committed")], kind="stat", width=4, height=4,
        ),
        Panel(
            "In use", "Share of the budget that open sequences hold; cached blocks can go.",
            "percentunit", [Query(recorded("kv_in_use:ratio"), "in use")], kind="stat", width=4,
            height=4, maximum=1, thresholds=[(0.8, WARNING), (0.95, CRITICAL)],
        ),
        Panel(
            "Saved by sharing", "What sequences would take besides if each had its own copy.",
            "bytes", [Query(value("quire_kv_shared_saved_bytes"), "saved")], kind="stat", width=4,
            height=4,
        ),
        Panel(
            "Footprint", "What the system counts as this process's memory.", "bytes",
            [Query(FOOTPRINT, "footprint")], kind="stat", width=4, height=4,
        ),
        Panel(
            "Pressure", "0 normal, 1 warning, 2 critical; says the system.", "short",
            [Query(f"max (quire_memory_pressure_level{{{CHOSEN}}})", "level")], kind="stat",
            width=4, height=4, maximum=2, thresholds=[(1, WARNING), (2, CRITICAL)],
        ),
    ],
)  # fmt: skip

POOL = Row(
    "K and V",
    [
        Panel(
            "What the budget is used for",
            "The six uses are the whole budget, exactly. Cached blocks belong to nobody and are "
            "kept for prompts that begin alike; quarantined ones wait for the device.",
            "bytes",
            [Query(value(f"quire_kv_{use}_bytes"), use) for use in USES],
            width=24, height=11, stacked=True, colors=USES,
        ),
        Panel(
            "Budget, committed, live",
            "Committed is what the system charges. What lies between it and live tokens is ends of "
            "blocks, kept prefixes and slack.",
            "bytes",
            [
                Query(value("quire_kv_capacity_bytes"), "budget"),
                Query(COMMITTED, "committed"),
                Query(LIVE, "live"),
                Query(value("quire_kv_free_slack_bytes"), "slack"),
            ],
            width=12,
        ),
        Panel(
            "Shared",
            "Sequences with the same beginning map the same blocks: what all take, and what copies "
            "would take besides.",
            "bytes",
            [
                Query(f"sum (quire:kv_bytes:by_use{{{CHOSEN},use=~\"{OPEN}\"}})", "taken"),
                Query(value("quire_kv_shared_saved_bytes"), "saved by sharing"),
            ],
            width=12, stacked=True,
        ),
        Panel(
            "Waste and sharing",
            "Waste: share of open sequences' blocks that holds no token. Saved: share of what they "
            "would take alone.",
            "percentunit",
            [
                Query(recorded("kv_waste:ratio"), "waste"),
                Query(recorded("kv_shared_saved:ratio"), "saved by sharing"),
            ],
            maximum=1,
        ),
        Panel(
            "Heaps", "Pieces of memory that blocks lie in; kept ones stay until the end.", "short",
            [
                Query(value("quire_kv_heaps"), "heaps"),
                Query(value("quire_kv_heaps_kept"), "kept"),
            ],
        ),
        Panel(
            "Mappings", "Blocks put behind addresses of sequences, and taken from there.", "ops",
            [
                Query(rate("quire_kv_mapped_blocks_total"), "mapped"),
                Query(rate("quire_kv_unmapped_blocks_total"), "unmapped"),
            ],
        ),
        Panel(
            "Steps that waited for a mapping",
            "The first step of a prompt waits; others should find theirs made ahead.", "ops",
            [
                Query(rate("quire_mapping_waits_total"), "waited"),
                Query(rate("quire_steps_total"), "steps"),
            ],
        ),
        Panel(
            "Evictions and preemptions",
            "Kept blocks given up for running sequences, and sequences that gave way.", "short",
            [
                Query(increase("quire_prefix_evicted_blocks_total"), "blocks evicted"),
                Query(increase("quire_preemptions_total"), "preemptions"),
            ],
        ),
        Panel(
            "Copied", "Only answers beyond the first (n) copy, each less than one block.", "Bps",
            [Query(rate("quire_kv_copied_bytes_total"), "copied")],
        ),
    ],
)  # fmt: skip

PROCESS = Row(
    "Process and machine",
    [
        Panel(
            "Process",
            "Footprint is what the system counts as this process's own: on macOS what Activity "
            "Monitor shows, on Linux private memory, swap and the heaps.",
            "bytes",
            [
                Query(FOOTPRINT, "footprint"),
                Query(value("process_resident_memory_bytes"), "resident"),
                Query(SYSTEM, "machine"),
            ],
            width=12,
        ),
        Panel(
            "MLX", "Arrays outside of K and V: weights, activations, and what MLX keeps for next.",
            "bytes",
            [
                Query(value("quire_mlx_active_bytes"), "active"),
                Query(value("quire_mlx_cache_bytes"), "cache"),
                Query(value("quire_mlx_peak_bytes"), "peak"),
            ],
            width=12,
        ),
        Panel(
            "Machine", "Memory that programs can still have, and swap in use.", "bytes",
            [
                Query(f"min (quire_system_memory_available_bytes{{{CHOSEN}}})", "available"),
                Query(f"max (quire_system_swap_used_bytes{{{CHOSEN}}})", "swap used"),
                Query(SYSTEM, "total"),
            ],
        ),
        Panel(
            "Pressure",
            "On warning, quire forgets prefixes and lets nobody new in (cache.heed_pressure).",
            "short",
            [Query(f"max (quire_memory_pressure_level{{{CHOSEN}}})", "level")],
            maximum=2, thresholds=[(1, WARNING), (2, CRITICAL)],
        ),
        Panel(
            "Addresses", "Ranges of sequences are reserved, not used: virtual memory is large.",
            "bytes", [Query(value("process_virtual_memory_bytes"), "virtual")],
        ),
        Panel(
            "Descriptors and threads", "Neither should grow while the load does not.", "short",
            [
                Query(value("process_open_fds"), "open files"),
                Query(value("process_max_fds"), "limit"),
                Query(value("process_threads"), "threads"),
            ],
        ),
    ],
)  # fmt: skip

BOARD = Board(
    "quire-memory",
    "quire: memory",
    "K and V, sharing, heaps, the process and the machine.",
    [NOW, POOL, PROCESS],
)
