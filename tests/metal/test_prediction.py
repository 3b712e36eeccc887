"""The prediction: its arithmetic by hand, what others measured, and that the page holds it."""

import io
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import __version__ as mlx_lm_version
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.qwen3 import Model, ModelArgs

from engine.models.tensors import Matrix
from tests.metal.prediction import sheet
from tests.metal.prediction.assumptions import Chip, Mark
from tests.metal.prediction.engines import (
    AFTER,
    AFTER_14,
    BEFORE,
    GENERATE,
    GENERATOR,
    SERVER,
    BufferLimits,
    Overlap,
)
from tests.metal.prediction.measured import MEASURED, Measured
from tests.metal.prediction.model import (
    Machine,
    Work,
    buffers,
    chunk_s,
    chunks,
    decode_step,
    dispatches,
    launches_s,
    prompt_rate,
    turnover_s,
)
from tests.metal.roofline import device, shapes
from tests.models import QWEN3_4B

KIB = 1024
ENGINES = (SERVER, GENERATOR, BEFORE, AFTER, AFTER_14)


def on(chip: str, **values: float) -> Machine:
    """A chip; some assumptions have these values."""
    its = sheet.machine(chip)
    changed: dict[str, Any] = {
        name: replace(its.given[name], value=value, least=min(value, its.given[name].least),
                      most=max(value, its.given[name].most))
        for name, value in values.items()
    }  # fmt: skip
    return replace(its, given=replace(its.given, **changed))


def work(model: str = "4B") -> Work:
    return sheet.models()[model][1]


# --- the page, and what it stands on ------------------------------------------------------------


def test_the_page_holds_the_prediction_that_the_script_writes() -> None:
    assert sheet.SECTION.main(sheet.sheet(), ["--check"]) == 0


@pytest.mark.parametrize("its", MEASURED, ids=lambda its: f"{its.chip} {its.model} {its.context}")
def test_the_model_says_what_others_have_measured(its: Measured) -> None:
    predicted = its.predicted(sheet.machine(its.chip), work(its.model))
    # Small products of prompts fill no GPU, which the model does not know.
    most = 0.75 if its.is_prompt and its.model == "0.6B" else 0.15
    assert predicted == pytest.approx(its.tokens_per_s, rel=most)


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [(1, 0.129), (2, 0.129), (4, 0.165), (8, 0.323), (32, 0.513), (33, 1.002)],
)
def test_products_take_what_was_measured_on_an_m3_max(rows: int, milliseconds: float) -> None:
    seconds = on("M3 Max", read_share=0.97).product_s(Matrix("", 17408, 5120), rows)
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.05)  # mlx#3863


@pytest.mark.parametrize("chip", sheet.CHIPS)
def test_every_assumption_has_a_range_around_it_a_unit_and_a_source(chip: str) -> None:
    for its in sheet.assumed(sheet.machine(chip).given):
        assert its.least <= its.value <= its.most
        assert its.what
        assert its.unit
        # Only an estimate may say that nothing stands behind it.
        assert its.source != "none" or its.mark is Mark.ESTIMATE


def graph_operations(layers: int, batch: bool) -> Counter[str]:
    """The primitives of a decode step of mlx-lm's own Qwen3, by name; on a CPU, where norms,
    rotations and attention fall apart, each into what no other has."""
    arguments = ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=128,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
        vocab_size=128,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=1e6,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with mx.stream(mx.cpu):
        model = Model(arguments)
        nn.quantize(model, 32, 4)
        caches: list[Any] = [BatchKVCache([0]) if batch else KVCache() for _ in range(layers)]
        model(mx.zeros((1, 4), mx.int32), cache=caches)
        mx.eval(model.parameters(), [cache.state for cache in caches])
        logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
        outputs = [logits, *(cache.offset for cache in caches if batch)]
        text = io.StringIO()
        mx.export_to_dot(text, *outputs)
    return Counter(
        re.sub("^Compiled.*", "Compiled", name)
        for name in re.findall(r'label ?= ?"([^"]+)"', text.getvalue())
    )


def test_mlx_lm_dispatches_in_a_layer_what_is_counted() -> None:
    assert mlx_lm_version == "0.32.2"  # whose sources were read
    more = graph_operations(3, batch=True) - graph_operations(2, batch=True)
    products, writes, swiglu = more["QuantizedMatmul"], more["SliceUpdate"], more["Compiled"]
    norms, rotations, attention = more["Square"], more["Cos"], more["Softmax"]
    assert (norms, products, rotations, writes, attention, swiglu) == (4, 7, 2, 2, 1, 1)
    alone = graph_operations(3, batch=False) - graph_operations(2, batch=False)
    assert more["Add"] - alone["Add"] == 1  # the offsets of a batch
    sums = 2
    counted = norms + products + rotations + writes + attention + swiglu + sums
    assert SERVER.dependent + SERVER.independent == counted + 1
    assert GENERATE.dependent + GENERATE.independent == counted


# --- the arithmetic by hand ---------------------------------------------------------------------


def test_a_product_takes_as_long_as_reading_it_or_as_computing() -> None:
    matrix = Matrix("", 4096, 4096)
    machine = on("M4 Max", read_share=0.5, vector_share=0.25, matrix_share=0.5)
    assert machine.product_s(matrix, 1) == pytest.approx(4096**2 * 4.5 / 8 / (546e9 / 2))
    peak = machine.chip.device.ops_per_s
    assert machine.product_s(matrix, 14) == pytest.approx(2 * 4096**2 * 14 / (peak / 4))
    assert machine.product_s(matrix, 33) == pytest.approx(2 * 4096**2 * 64 / (peak / 2))
    five = on("M5 Max", vector_share=0.25)
    lanes = five.chip.device.ops_per_s / 4  # without its matrix units
    assert five.product_s(matrix, 24) == pytest.approx(2 * 4096**2 * 24 / (lanes / 4))


def test_launches_are_counted_layer_by_layer() -> None:
    its = work()
    assert dispatches(BEFORE, Chip(device("M4 Max")), its, 2 * KIB) == (36 * 14 + 14, 36 * 3)
    assert dispatches(SERVER, Chip(device("M4 Max")), its, 1000) == (36 * 13 + 14, 36 * 7)
    # A second pass of MLX's attention: from 1024 keys on, or from 4096 on the base chip.
    assert dispatches(SERVER, Chip(device("M4 Max")), its, 1024) == (36 * 14 + 14, 36 * 7)
    assert dispatches(SERVER, Chip(device("M4")), its, 4095) == (36 * 13 + 14, 36 * 7)
    assert dispatches(SERVER, Chip(device("M4")), its, 4096) == (36 * 14 + 14, 36 * 7)
    machine = on("M4 Max", dispatch_us=2.0, independent_share=0.5, buffer_us=10.0)
    number = buffers(BEFORE, machine.chip, its, 36 * 17 + 14)
    expected = (36 * 14 + 14) * 2 + 36 * 3 * 1 + number * 10
    assert launches_s(BEFORE, machine, its, 2 * KIB) == pytest.approx(expected * 1e-6)


def test_command_buffers_end_after_operations_or_numbers() -> None:
    chip = Chip(device("M4 Max"))
    # 36 layers of 15.8 millions of words, scales and biases: every 51 / 15.8 layers; and the last.
    assert work().array_numbers == pytest.approx(36 * 15.8 * 1e6 / 2**20, rel=0.01)
    assert buffers(BEFORE, chip, work(), 626) == 14
    assert buffers(AFTER, chip, work(), 554) == 7
    assert buffers(AFTER, Chip(device("M5 Max")), work(), 554) == 12  # its limits stay
    one = replace(AFTER, limits=BufferLimits(10**6, 10**6))
    assert buffers(one, chip, work(), 554) == 2


def test_a_step_waits_for_the_host_as_its_overlap_has_it() -> None:
    machine = on(
        *("M5 Max",), host_factor=1, wake_us=100, own_step_us=200, own_token_us=50, own_build_us=10,
        traverse_us=1, encode_us=2, front_token_us=0, mlx_lm_build_us=20, mlx_lm_token_us=30,
        round_trip_us=500, reads_in_series=1,
    )  # fmt: skip
    its, context = work(), 2 * KIB
    whole = decode_step(AFTER, machine, its, context, 2)
    assert whole.period_s == whole.gpu_s
    first = decode_step(BEFORE, machine, its, context, 2)
    number = sum(dispatches(BEFORE, machine.chip, its, context))
    parts = buffers(BEFORE, machine.chip, its, number)
    host = 100 + 200 + 2 * 50 + number + 2 * number / parts
    gap = host * 1e-6 - first.gpu_s / 36
    assert first.period_s == pytest.approx(first.gpu_s + gap)
    server = decode_step(SERVER, machine, its, context, 2)
    number = sum(dispatches(SERVER, machine.chip, its, context))
    parts = buffers(SERVER, machine.chip, its, number)
    host = 100 + 2 * 500 + 2 * 30 + 36 * 20 + number + 2 * number / parts
    assert server.period_s == pytest.approx(server.gpu_s + host * 1e-6)
    # A host that is slower than the GPU is all that counts.
    slow = on("M5 Max", host_factor=100)
    assert decode_step(AFTER, slow, its, context, 1).period_s > 10 * whole.gpu_s


def test_mlx_lms_cache_is_copied_when_it_grows_and_when_sequences_come_and_go() -> None:
    machine, its = on("M4 Max", read_share=0.5), work()
    token = 144 * KIB  # of K and V, as Qwen3-4B is known by
    even = decode_step(GENERATOR, machine, its, 2 * KIB, 8).gpu_s
    ragged = decode_step(GENERATOR, machine, its, 2 * KIB, 8, longest=6 * KIB).gpu_s
    assert ragged - even == pytest.approx(2 * 8 * 4 * KIB * token / 256 / 273e9)
    # Eight out and in and two rows of their own, read and written.
    assert turnover_s(machine, its, 2 * KIB, 8) == pytest.approx(2 * 18 * 2 * KIB * token / 273e9)


def test_a_prompt_is_computed_in_chunks_that_add_up() -> None:
    machine, its = on("M1"), work()
    ours, theirs = (list(chunks(engine, machine, its, 5000)) for engine in (AFTER, SERVER))
    assert sum(count for count, _ in ours) == 5000
    assert [count for count, _ in theirs] == [2048, 2048, 904]
    # quire's take half a second, as soon as its budget has seen what one takes.
    assert all(seconds < 1.25 * 0.5 for _, seconds in ours[2:])
    rate = prompt_rate(AFTER, machine, its, 5000)
    head_s = machine.product_s(its.head, 1)
    assert 5000 / rate == pytest.approx(sum(seconds for _, seconds in ours) + head_s)


def test_a_causal_chunk_leaves_half_of_its_own_keys_out() -> None:
    machine, its = on("M4 Max", array_mask=1.0), work()
    array = replace(GENERATE, masks_with_array=True)
    peak = machine.chip.device.ops_per_s * machine.given.prompt_attention_share.value
    saved = 36 * 4 * 32 * 128 * 2048 * 1024 / peak
    both = [chunk_s(engine, machine, its, 8 * KIB, 2048) for engine in (array, GENERATE)]
    assert both[0] - both[1] == pytest.approx(saved)


# --- what holds whatever the numbers ------------------------------------------------------------


@pytest.mark.parametrize("chip", sheet.CHIPS)
@pytest.mark.parametrize("sequences", sheet.SEQUENCES)
def test_fewer_dispatches_are_never_slower(chip: str, sequences: int) -> None:
    for engine in ENGINES:
        for kind in ("dependent", "independent"):
            fewer = [replace(engine, **{kind: getattr(engine, kind) - less}) for less in (2, 1, 0)]
            periods = [
                decode_step(its, sheet.machine(chip), work(), 2 * KIB, sequences).period_s
                for its in fewer
            ]
            assert periods == sorted(periods)


@pytest.mark.parametrize("chip", sheet.CHIPS)
@pytest.mark.parametrize("model", sheet.SPECS)
def test_after_is_never_slower_than_before_and_longer_is_never_faster(
    chip: str, model: str
) -> None:
    machine = sheet.machine(chip)
    for sequences in sheet.SEQUENCES:
        for engine in ENGINES:
            periods = [
                decode_step(engine, machine, work(model), context, sequences).period_s
                for context in sheet.CONTEXTS.values()
            ]
            assert periods == sorted(periods)
        before, after, last = (
            decode_step(engine, machine, work(model), 2 * KIB, sequences).period_s
            for engine in (BEFORE, AFTER, AFTER_14)
        )
        assert before >= after >= last


def test_more_overlap_is_never_slower() -> None:
    order = (Overlap.READ_BEHIND, Overlap.FIRST_LAYER, Overlap.WHOLE_STEP)
    for chip in sheet.CHIPS:
        engines = [replace(BEFORE, overlap=its) for its in order]
        periods = [
            decode_step(its, sheet.machine(chip), work(), 2 * KIB, 8).period_s for its in engines
        ]
        assert periods == sorted(periods, reverse=True)


def test_a_spec_with_other_heads_is_planned_by_its_own() -> None:
    fewer = replace(QWEN3_4B, num_key_value_heads=2)
    plain, grouped = (Work.of(its) for its in shapes({"8": QWEN3_4B, "2": fewer}).values())
    assert plain.kv_bytes(100) == 4 * grouped.kv_bytes(100)
    assert grouped.tokens_per_block == 4 * plain.tokens_per_block
    assert grouped.array_numbers < plain.array_numbers
    machine = sheet.machine("M4 Max")
    share = machine.given.shared_attention_share.value  # 16 heads for each KV head
    seconds = machine.attention_s(SERVER, grouped, 32 * KIB, 8)
    assert seconds == pytest.approx(8 * grouped.kv_bytes(32 * KIB) / (machine.bytes_per_s * share))
    assert decode_step(AFTER, machine, grouped, 32 * KIB, 8).period_s < (
        decode_step(AFTER, machine, plain, 32 * KIB, 8).period_s
    )


def test_a_window_bounds_what_a_layer_reads() -> None:
    windowed = replace(
        work(), layers=tuple(replace(its, window=1000) for its in work().layers)
    )  # fmt: skip
    assert windowed.kv_bytes(10**5) == windowed.kv_bytes(1000) == work().kv_bytes(1000)
    machine = sheet.machine("M4 Max")
    near, far = (decode_step(SERVER, machine, windowed, at, 1) for at in (1000, 10**5))
    assert near == far


def test_a_range_lies_around_its_value_and_the_widest_swing_stands_first() -> None:
    machine = sheet.machine("M4 Max")

    def value(its: Machine) -> float:
        return sheet.ratio(AFTER, SERVER, work(), 2 * KIB, 8, its)

    low, high = sheet.spread(value, machine)
    assert low < value(machine) < high
    widths = [abs(first - last) for first, last, _ in sheet.swings(value, machine)]
    assert widths == sorted(widths, reverse=True)
    # Where nothing is read in series, mlx-lm's server is as fast as its generator, or the host's.
    found = {its.what: (first, last) for first, last, its in sheet.swings(value, machine)}
    never, always = found[machine.given.reads_in_series.what]
    assert never < always
