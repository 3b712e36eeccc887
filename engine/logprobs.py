"""Log-probabilities, of the model's own distribution: before penalties and temperature."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import mlx.core as mx

from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Arrays that are still to be evaluated, of some rows."""

    num_tops: SequenceOf[int | None]
    chosen: mx.array
    top_ids: mx.array | None
    top: mx.array | None

    @classmethod
    def of(
        cls, raw: mx.array, ids: mx.array, num_tops: SequenceOf[int | None]
    ) -> "Logprobs | None":
        """Return those of the tokens ``ids``, ``[R]``; None where no row reports anything.

        raw: logits ``[R, vocab]`` float32. num_tops: how many alternatives each row reports, None
        for a row that reports nothing.
        """
        if all(n is None for n in num_tops):
            return None
        logprobs = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, ids[:, None].astype(mx.int32), axis=-1)[:, 0]
        max_tops = min(max(n or 0 for n in num_tops), raw.shape[-1])
        if max_tops == 0:
            return cls(num_tops, chosen, None, None)
        places = mx.argpartition(-logprobs, max_tops - 1, axis=-1)[:, :max_tops]
        return cls(num_tops, chosen, places, mx.take_along_axis(logprobs, places, axis=-1))

    @property
    def arrays(self) -> list[mx.array]:
        """Return what is to be evaluated."""
        return [a for a in (self.chosen, self.top_ids, self.top) if a is not None]

    def read(self) -> list[TokenLogprobs | None]:
        """Return the values, row by row."""
        result: list[TokenLogprobs | None] = []
        chosen: list[float] = self.chosen.tolist()  # type: ignore[assignment]
        # Whole: a row of its own would be computed behind the step that runs by now.
        ids, values = self._top()
        for row, count in enumerate(self.num_tops):
            if count is None:
                result.append(None)
                continue
            top: list[tuple[int, float]] = []
            if count:
                pairs = zip(ids[row], values[row], strict=True)
                top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            result.append(TokenLogprobs(chosen[row], tuple(top[:count])))
        return result

    def _top(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return the ids and values of the alternatives, where any row reports some."""
        if self.top_ids is None or self.top is None:
            return [], []
        return self.top_ids.tolist(), self.top.tolist()  # type: ignore[return-value]
