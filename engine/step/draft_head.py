"""Drafts tokens with the model's own head for drafts (MTP, multi-token prediction)."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import mlx.core as mx

from engine.step.plan import Sampling, SamplingState
from engine.step.runner import cancelling
from engine.step.sampler import sample
from engine.step.sequence import Sequence
from kvcache.manager import KVCacheManager
from kvcache.views import KVViews
from metal_ext import CpuWorkers


class DraftModel(Protocol):
    """A model with a head for drafts. The class Forward (engine/models) implements this."""

    def draft(self, token_ids: mx.array, before: mx.array, views: KVViews) -> mx.array: ...

    def head(self, states: mx.array) -> mx.array: ...


class DraftHead:
    """Runs the head, which makes one draft per sequence in a pass. Use it only on the thread that
    owns MLX."""

    def __init__(
        self, model: DraftModel, kv: KVCacheManager, workers: CpuWorkers | None = None
    ) -> None:
        """``workers`` is None on a GPU."""
        self._model = model
        self._kv = kv
        self._workers = workers

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return as many drafts as wanted after each sequence's newest token."""
        deepest = sorted(range(len(wanted)), key=lambda number: -wanted[number][1])
        tokens = mx.array([wanted[number][0].token_ids[-1] for number in deepest])
        before: mx.array | None = None
        drafts: list[list[int]] = [[] for _ in wanted]
        passes: list[KVViews] = []
        sampled: list[mx.array] = []
        ends: list[mx.array] = []
        with cancelling(passes):
            for depth in range(wanted[deepest[0]][1]):
                rows = [wanted[number][0] for number in deepest if wanted[number][1] > depth]
                places = [(row.seq_id, row.num_tokens - 1 + depth) for row in rows]
                views = self._kv.preview(places)
                passes.append(views)
                if before is None:
                    assert views.hidden is not None, "the cache keeps no hidden states"
                    before = views.hidden.first()
                before = self._model.draft(tokens[: len(rows)], before[: len(rows)], views)
                tokens = self._sample(self._model.head(before), rows, depth).astype(mx.int32)
                sampled.append(tokens)
                ends += views.step_end([tokens, before])
            mx.eval(ends)  # once, since each pass takes its tokens from the one before
        for ids in sampled:
            newest: list[int] = ids.tolist()  # type: ignore[assignment]
            for number, token in zip(deepest, newest, strict=False):
                drafts[number].append(token)
        return [tuple(each) for each in drafts]

    def _sample(self, logits: mx.array, rows: SequenceOf[Sequence], depth: int) -> mx.array:
        """Return the likeliest tokens with the noise that the model's own tokens at these places
        will have. Masks are left out, as forbidden drafts are cut later."""
        samplings = [Sampling(row.params, row.num_generated + depth) for row in rows]
        histories = [row.history if row.params.penalises else None for row in rows]
        state = SamplingState(None, histories) if any(histories) else None
        return sample(logits, samplings, state, self._workers).arrays[0]
