"""Checks on the loaded model that a step with drafts computes the bits of steps without drafts, on
which it depends that drafts change no answer.

On a CPU that always holds. On a GPU it does for as many rows as quire's own kernels multiply, if
weights have one of their formats. MLX's products choose their kernels by the number of rows. `quire
doctor --first-hour` compares such products one by one (kvcache/selftest/kernels.py)."""

import mlx.core as mx

from engine.step.drafts import MAX_DRAFTS
from engine.step.plan import PlanEntry, Sampling, StepPlan
from engine.step.runner import Model, ModelRunner
from engine.types import PrefixSalt, SamplingParams
from kvcache.manager import KVCacheManager
from kvcache.views import KVViews
from metal_ext import CpuWorkers

PROMPT_TOKENS = 9
# The rows of a sequence in each compared step, if the step has room for them. The last step begins
# with what drafts have left.
ROWS = (1 + MAX_DRAFTS, 4, 2, 1)
# The number of sequences in a step with company.
COMPANY = 3
TOO_SMALL = "the cache is too small to compare steps with drafts and without"
CHOICE = Sampling(SamplingParams(max_tokens=sum(ROWS), temperature=0.0), 0)


class DraftFaultError(Exception):
    """Drafts of a model's head would change answers. The message is DraftCheck's."""


class DraftCheck:
    """A model that passes calls on to the loaded one, and keeps the bits of its results."""

    def __init__(
        self, model: Model, kv: KVCacheManager, vocab_size: int, workers: CpuWorkers | None = None
    ) -> None:
        """No sequence may be open in ``kv``. ``workers`` is None on a GPU."""
        self._model = model
        self._kv = kv
        self._vocab_size = vocab_size
        self._runner = ModelRunner(self, kv, workers=workers)
        self._bits = mx.array([])

    def fault(self, max_num_seqs: int, max_rows: int) -> str:
        """Return half a sentence about rows whose bits drafts change, or "" if there are none, in
        steps of up to ``max_rows`` rows."""
        alone = self._run((1,) * sum(ROWS), 1)
        for sequences in (1, min(COMPANY, max_num_seqs)):
            rows = tuple(min(count, max_rows // sequences) for count in ROWS)
            drafted, start = self._run(rows, sequences), 0
            if alone is None or drafted is None:
                return TOO_SMALL
            for count in rows:
                end = start + count
                if not mx.array_equal(alone[start:end], drafted[start:end]):
                    return f"{count * sequences} rows together have other bits than one by one"
                start = end
        return ""

    def _run(self, rows: tuple[int, ...], sequences: int) -> mx.array | None:
        """Run steps with this many rows of each sequence after its prompt. Return the bits of the
        last one's rows ``[sum(rows), bytes]``, or None if the cache has no room. The last sequence
        has the id 0, and the same tokens in any company."""
        kv, end, bits = self._kv, PROMPT_TOKENS + sum(rows), list[mx.array]()
        opened = [seq_id for seq_id in range(sequences - 1, -1, -1) if self._open(seq_id, end)]
        if len(opened) == sequences:
            prompts = all(self._step([seq_id], 0, PROMPT_TOKENS) for seq_id in opened)
            start = PROMPT_TOKENS
            for count in rows if prompts else ():
                if not self._step(opened, start, count, drafts=count - 1):
                    break
                bits.append(self._bits[-count:])
                mx.eval(bits)
                start += count
        for seq_id in opened:
            kv.close(seq_id, keep_prefix=False)
        while kv.recovering:
            kv.step_completed(self._runner.completed_epoch)
        return mx.concatenate(bits) if len(bits) == len(rows) else None

    def _open(self, seq_id: int, num_tokens: int) -> bool:
        hashes = self._kv.block_hashes(PrefixSalt())
        hashes.max_cached_tokens = 0
        hashes.extend(self._tokens(seq_id, 0, PROMPT_TOKENS), 0)
        opened = self._kv.open(seq_id, hashes, num_tokens, final_tokens=num_tokens)
        return opened is not None

    def _step(self, seq_ids: list[int], start: int, count: int, drafts: int | None = None) -> bool:
        """Run a step with ``count`` rows of each sequence, a chunk of its prompt if ``drafts`` is
        None. Return False if memory is short."""
        kv, end = self._kv, start + count
        if not all(kv.reserve(seq_id, end, drafts or 0) for seq_id in seq_ids):
            return False
        choice = None if drafts is None else CHOICE
        tokens = {seq_id: self._tokens(seq_id, start, count) for seq_id in seq_ids}
        entries = [
            PlanEntry(seq_id, start, count, ids, choice, drafts=drafts or 0)
            for seq_id, ids in tokens.items()
        ]
        step = self._runner.begin(StepPlan(1, tuple(entries)))
        step.submit(None)
        step.read()
        for seq_id, ids in tokens.items():
            kv.commit(seq_id, ids)
        kv.step_completed(self._runner.completed_epoch)
        return True

    def _tokens(self, seq_id: int, start: int, count: int) -> tuple[int, ...]:
        return tuple((7 * at + seq_id) % self._vocab_size for at in range(start, start + count))

    # --- as the runner's model --------------------------------------------------------------------

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        return self._model.hidden(token_ids, views, rows)

    def head(self, states: mx.array) -> mx.array:
        logits = self._model.head(states)
        self._bits = mx.concatenate([states.view(mx.uint8), logits.view(mx.uint8)], axis=1)
        return logits
