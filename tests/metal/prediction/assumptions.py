"""What the prediction assumes of a chip, of macOS and of both engines' hosts: value, range, source.

Sources are issues and pull requests by repository and number, or a repository's file. Ranges are
what is plausible, not statistics. A *share* is of what the line names.
"""

from dataclasses import dataclass, fields, replace
from enum import Enum

from engine.planning.devices import Device


class Mark(Enum):
    """How far an assumption is to be trusted."""

    MEASURED = "measured by others"
    DERIVED = "derived from sources"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that the arithmetic uses."""

    what: str
    unit: str
    value: float
    least: float
    most: float
    mark: Mark
    source: str

    def __post_init__(self) -> None:
        assert self.least <= self.value <= self.most, self.what


@dataclass(frozen=True, slots=True)
class Chip:
    """A device, and what MLX goes by."""

    device: Device

    @property
    def generation(self) -> int:
        """1 for the M1."""
        return int(self.device.name[1])

    @property
    def is_ultra(self) -> bool:
        """Two dies."""
        return self.device.name.endswith("Ultra")

    @property
    def is_base(self) -> bool:
        """Neither Pro nor Max nor Ultra: MLX's architecture ends in g, else in s, an Ultra's in d
        (mlx#3852, mlx#3863)."""
        return " " not in self.device.name


@dataclass(frozen=True, slots=True)
class Assumptions:
    """All of them, for one chip. Times of a host are for that chip's."""

    read_share: Assumption
    wide_attention_share: Assumption
    shared_attention_share: Assumption
    own_wide_attention_share: Assumption
    own_shared_attention_share: Assumption
    vector_share: Assumption
    matrix_share: Assumption
    prompt_attention_share: Assumption
    array_mask: Assumption
    dispatch_us: Assumption
    independent_share: Assumption
    buffer_us: Assumption
    host_factor: Assumption
    mlx_lm_build_us: Assumption
    own_build_us: Assumption
    traverse_us: Assumption
    encode_us: Assumption
    wake_us: Assumption
    round_trip_us: Assumption
    mlx_lm_token_us: Assumption
    own_step_us: Assumption
    own_token_us: Assumption
    front_token_us: Assumption
    reads_in_series: Assumption
    waited_mapping_share: Assumption

    def varied(self) -> "list[tuple[str, Assumptions, Assumptions]]":
        """Each assumption's name, and all with that one at its least and at its most."""
        found = []
        for field in fields(self):
            its: Assumption = getattr(self, field.name)
            low, high = (
                replace(self, **{field.name: replace(its, value=end)})
                for end in (its.least, its.most)
            )
            found.append((field.name, low, high))
        return found

    def __getitem__(self, name: str) -> Assumption:
        its = getattr(self, name)
        assert isinstance(its, Assumption)
        return its


# lablup/mlxcel, benchmarks/pylm_m5max_2026-09-06.csv and pylm_m1ultra_...: mlx-lm 0.31.3.
MLXCEL = "mlxcel's sweep, below"
MLX_LM = "mlx-lm 0.32.2 server.py"
# Of what the memory's specification says, what long products of vectors reach.
READ_SHARES = {
    "M1 Ultra": (0.65, 0.57, 0.72, f"two slopes, 4B to 8B to 32B, of {MLXCEL}"),
    "M2 Ultra": (0.75, 0.65, 0.82, "between the other two Ultras"),
    "M3 Ultra": (0.80, 0.70, 0.85, "650 to 690 of 819 GB/s: inferencer-feedback#300 of mlx#3266"),
}
# Dependent dispatches of a real layer: launch, and the memory idle at both ends. Microseconds.
DISPATCHES = {
    1: (5.5, 3.0, 7.0, Mark.DERIVED, f"116 us a layer less its buffers, on an Ultra: {MLXCEL}"),
    2: (3.5, 2.5, 5.0, Mark.DERIVED, "mlx#1561: 7B at 123.8 tok/s on an M2 Ultra"),
    3: (3.6, 2.4, 5.0, Mark.MEASURED, "2.4 in a chain of empty ones, mlx#4521; 8B: Rapid-MLX#636"),
    4: (3.0, 2.0, 4.0, Mark.DERIVED, "mlx-lm BENCHMARKS.md, 4B on an M4 Max"),
    5: (2.2, 1.5, 3.0, Mark.DERIVED, f"36 us a layer: {MLXCEL}"),
}
# A command buffer's end and the next one's beginning. Microseconds.
BUFFERS = {
    1: (38.0, 0.0, 45.0, "mlxcel#358: 11 to 13 % with more operations in each on an M1 Ultra"),
    2: (38.0, 0.0, 75.0, "mlx#1561: 125.9 to 130.9 tok/s with 80 operations instead of 50"),
    3: (20.0, 0.0, 25.0, "mlx#4521; 0 for large products, the same thread"),
    4: (20.0, 0.0, 25.0, "as an M3's"),
    5: (2.0, 0.0, 10.0, "mlxcel#358: no more than 1.7 % on an M5 Max"),
}
# One thread's time, beside an M5's.
HOST_FACTORS = {1: 1.7, 2: 1.5, 3: 1.3, 4: 1.1, 5: 1.0}


def read_share(chip: Chip) -> Assumption:
    """Of weights."""
    value, least, most, source = READ_SHARES.get(
        chip.device.name,
        (0.89, 0.80, 0.96, f"0.93 mlx#3852, 0.97 mlx#3863, 0.90 {MLXCEL}"),
    )
    return Assumption(
        "reading weights", "share of peak bandwidth", value, least, most, Mark.DERIVED, source
    )


def vector_share(chip: Chip) -> Assumption:
    """Of few rows."""
    value, least, most, source = (
        (0.26, 0.20, 0.30, "mlx#3839: 3.44 times one row's time for 8, on an M4 Pro with 0.31.2")
        if chip.generation < 3
        else (0.31, 0.28, 0.34, "mlx#3863 on an M3 Max, mlx#3852 on an M4 Pro, M = 4 to 8")
    )
    return Assumption(
        "products with few rows", "share of the lanes' peak", value, least, most, Mark.DERIVED,
        source,
    )  # fmt: skip


def matrix_share(chip: Chip) -> Assumption:
    """Of many rows."""
    if chip.is_ultra:
        value, least, most, source = 0.40, 0.33, 0.65, f"prompts of 512 on an M1 Ultra, {MLXCEL}"
    elif chip.generation == 5:
        value, least, most, source = 0.66, 0.50, 0.72, f"prompts of 512 on an M5 Max, {MLXCEL}"
    else:
        source = "mlx#3863 and mlx#3852, M = 32; prompts: mlx-lm BENCHMARKS.md, mlx-lm#1569"
        value, least, most = 0.78, 0.70, 0.82
    return Assumption(
        "products with many rows", "share of peak arithmetic", value, least, most, Mark.DERIVED,
        source,
    )  # fmt: skip


def _attention() -> dict[str, Assumption]:
    share = "share of weights' bandwidth"
    return {
        "wide_attention_share": Assumption(
            "MLX's decode attention, up to 4 query heads per KV head, with a mask",
            *(share, 0.93, 0.80, 1.00, Mark.MEASURED),
            "mlx#4076 on an M5 Pro: 234 to 264 of 266 GB/s; the mask is not in it",
        ),
        "shared_attention_share": Assumption(
            "MLX's decode attention, more than 4, with a mask",
            *(share, 0.74, 0.68, 0.82, Mark.MEASURED),
            "mlx#4076 0.71 on an M5 Pro, mlx#4077 0.78 on an M5 Max; a mask keeps MLX from its "
            "newer kernel",
        ),
        "own_wide_attention_share": Assumption(
            "quire's decode attention, up to 4 query heads per KV head",
            *(share, 0.88, 0.65, 1.00, Mark.ESTIMATE),
            "reads each byte once (decode.metal); others' that do: 0.68 to 0.72 vllm-metal#715, "
            "0.81 to 0.87 mlx#4077",
        ),
        "own_shared_attention_share": Assumption(
            "quire's decode attention, more than 4: each byte read once for each 4",
            *(share, 0.80, 0.60, 0.95, Mark.ESTIMATE),
            "as for up to 4",
        ),
    }


def _host() -> dict[str, Assumption]:
    us, per_layer, per_dispatch = "us", "us per layer", "us per dispatch"
    return {
        "mlx_lm_build_us": Assumption(
            "mlx-lm builds a graph",
            *(per_layer, 25, 15, 40, Mark.DERIVED),
            f"at most 62 with encoding, {MLXCEL}; 105 to 140 on a Xeon-class server core",
        ),
        "own_build_us": Assumption(
            "quire builds a graph",
            *(per_layer, 12, 7, 25, Mark.DERIVED),
            "45 to 67 where mlx-lm takes 105 to 140, in processor time on the same core",
        ),
        "traverse_us": Assumption(
            "MLX orders a graph before its first command",
            *(per_dispatch, 0.5, 0.25, 0.8, Mark.ESTIMATE),
            "mlx/transforms.cpp: twice over all arrays",
        ),
        "encode_us": Assumption(
            "MLX encodes",
            *(per_dispatch, 1.0, 0.6, 1.6, Mark.DERIVED),
            "mlx#4048: 0.85 ms a step for the handlers of a hybrid's operations alone, M3 Ultra",
        ),
        "wake_us": Assumption(
            "a thread wakes after its GPU event", us, 50, 20, 100, Mark.ESTIMATE, "none"
        ),
        "round_trip_us": Assumption(
            "an empty command buffer, there and back",
            *(us, 150, 60, 250, Mark.DERIVED),
            "with a kernel in it 250 to 280: mlx#4265, mlx#3837",
        ),
        "mlx_lm_token_us": Assumption(
            "mlx-lm's generation thread says a token",
            *("us per token", 25, 10, 60, Mark.ESTIMATE),
            f"{MLX_LM}: detokenizer, Response, queue",
        ),
        "own_step_us": Assumption(
            "quire's engine thread: read, commit, plan, emit",
            *("us per step", 120, 60, 250, Mark.ESTIMATE),
            "none",
        ),
        "own_token_us": Assumption(
            "and for each token", "us per token", 10, 5, 25, Mark.ESTIMATE, "none"
        ),
        "front_token_us": Assumption(
            "HTTP threads of either, under the same lock",
            *("us per token", 60, 30, 150, Mark.ESTIMATE),
            "none",
        ),
    }


def assumptions_for(chip: Chip) -> Assumptions:
    """What is assumed of that chip."""
    number = chip.generation
    dispatch = DISPATCHES[number]
    value, least, most, source = BUFFERS[number]
    factor = HOST_FACTORS[number]
    return Assumptions(
        read_share=read_share(chip),
        vector_share=vector_share(chip),
        matrix_share=matrix_share(chip),
        prompt_attention_share=Assumption(
            "attention of prompts",
            *("share of peak arithmetic", 0.55, 0.40, 0.70, Mark.ESTIMATE),
            "none; the same kernel in both",
        ),
        array_mask=Assumption(
            "attention of prompts with an array as mask",
            *("times as long", 1.1, 1.0, 1.3, Mark.ESTIMATE),
            "mlx-lm cache.py BatchKVCache.make_mask: no causal kernel",
        ),
        dispatch_us=Assumption(f"a dependent dispatch, M{number}", "us", *dispatch),
        independent_share=Assumption(
            "one that waits for nothing new",
            *("share of a dependent one", 0.4, 0.2, 1.0, Mark.MEASURED),
            "0.5 of 1.3 us: infr#14",
        ),
        buffer_us=Assumption(
            f"a command buffer, M{number}", "us", value, least, most, Mark.DERIVED, source
        ),
        host_factor=Assumption(
            f"times of hosts, M{number}",
            *("beside an M5", factor, 0.85 * factor, 1.2 * factor, Mark.ESTIMATE),
            "one thread's benchmarks",
        ),
        reads_in_series=Assumption(
            "mlx-lm's server reads each token's logprob behind the next step, which it has queued",
            *("0: never, 1: always", 1.0, 0.0, 1.0, Mark.DERIVED),
            f"{MLX_LM}: `r.logprobs[r.token].item()` on the one stream, after async_eval in "
            "generate.py; a like wait cost 20 %: mlx-vlm#1600",
        ),
        waited_mapping_share=Assumption(
            "of quire's mapping, that a step waits for",
            *("share", 0.02, 0.0, 0.1, Mark.ESTIMATE),
            "ahead, by a thread of its own (ARCHITECTURE.md)",
        ),
        **_attention(),
        **_host(),
    )
