import mlx.core as mx
import pytest

from kvcache.canary.products import product_actions
from kvcache.canary.trial import attempt


def test_this_machines_products_are_right() -> None:
    steps = attempt(product_actions(), lambda _: None)
    assert [step.name for step in steps] == ["multiply 1", "multiply 8", "multiply 64"]
    assert all(step.passed for step in steps), steps[-1]
    assert all(step.figures["greatest_difference"] < 1e-4 for step in steps)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_kernel_that_is_compiled_wrong_is_noticed(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mx.quantized_matmul

    def wrong(inputs: mx.array, *rest: mx.array, **how: object) -> mx.array:
        out = right(inputs, *rest, **how)  # type: ignore[arg-type]
        if len(inputs) != rows:
            return out
        # The last of the columns that a group of threads computes.
        return mx.where(mx.arange(out.shape[1]) % 64 == 63, mx.zeros_like(out), out)

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    step = attempt(product_actions(), lambda _: None)[-1]
    assert (step.name, step.passed) == (f"multiply {rows}", False)
    assert "of the greatest result; 0.02 is allowed" in step.said
