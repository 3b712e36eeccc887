"""The roofline sheet: its figures by hand, and that the page holds what the script writes."""

import pytest

from engine.planning.shape import ModelShape
from tests.metal import roofline

KIB = 1024


@pytest.fixture(scope="module")
def models() -> dict[str, ModelShape]:
    return roofline.shapes()


def test_the_page_holds_the_sheet_that_the_script_writes() -> None:
    assert roofline.SECTION.main(roofline.sheet(), ["--check"]) == 0


def test_a_step_reads_the_weights_once_and_the_past_of_every_sequence(
    models: dict[str, ModelShape],
) -> None:
    shape = models["4B"]
    one = roofline.decode_bytes(shape, 8 * KIB, 1)
    eight = roofline.decode_bytes(shape, 8 * KIB, 8)
    assert eight - one == 7 * 8 * KIB * 144 * KIB  # 144 KiB per token, as Qwen3-4B is known by
    assert one - 8 * KIB * 144 * KIB == pytest.approx(4.02e9 * 4.5 / 8, rel=0.01)


def test_the_parameters_are_those_that_the_models_are_named_after(
    models: dict[str, ModelShape],
) -> None:
    counts = {name: shape.parameters / 1e9 for name, shape in models.items()}
    assert counts == pytest.approx({"0.6B": 0.596, "4B": 4.02, "8B": 8.19}, rel=0.01)


def test_one_sequence_is_limited_by_bandwidth_and_many_short_ones_by_arithmetic(
    models: dict[str, ModelShape],
) -> None:
    device = roofline.device("M1")
    one = roofline.decode_limit(models["8B"], device, KIB, 1)
    assert not one.by_arithmetic
    assert one.tokens_per_s == pytest.approx(
        device.bytes_per_s / roofline.decode_bytes(models["8B"], KIB, 1)
    )
    assert roofline.decode_limit(models["8B"], device, KIB, 32).by_arithmetic


def test_a_smaller_page_is_mapped_more_often(models: dict[str, ModelShape]) -> None:
    shape, device = models["4B"], roofline.device("M1")
    assert [roofline.tokens_per_block(shape, page) for page in roofline.PAGES] == [8, 32, 128]
    seconds = [roofline.mapping_seconds(shape, device, page, 32) for page in roofline.PAGES]
    assert seconds == pytest.approx([0.6e-3, 0.15e-3, 0.0375e-3])


def test_gathering_a_past_costs_a_small_part_of_attending_to_it(
    models: dict[str, ModelShape],
) -> None:
    assert roofline.gather_share(models["4B"], roofline.device("M3 Max")) < 0.1
