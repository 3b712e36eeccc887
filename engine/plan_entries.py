"""Writes down what a step computes of a sequence, as values."""

import numpy as np

from engine.step_plan import PendingToken, PlanEntry, Sampling, Scoring, TokenHistory
from engine.types import Sequence


def plan_entry(sequence: Sequence, stop: int, newest_plan: int) -> PlanEntry:
    """Return the entry that computes a sequence's tokens up to ``stop``, from where the steps in
    flight end. newest_plan: the number of the plan before this one."""
    start, token_ids = sequence.progress.scheduled, sequence.token_ids
    num_known = len(token_ids)
    tokens: tuple[int, ...] | PendingToken
    if start < num_known:
        tokens = tuple(token_ids[start:stop])
    else:
        tokens = PendingToken(newest_plan, sequence.sampled_row)
    sampling = None
    if stop == num_known + sequence.num_output_placeholders:
        history = _history(sequence) if sequence.penalises else None
        sampling = Sampling(sequence.request.params, stop - sequence.num_prompt, history)
    scoring = _scoring(sequence, stop) if sequence.scores_prompt else None
    return PlanEntry(sequence.seq_id, start, stop - start, tokens, sampling, scoring)


def _history(sequence: Sequence) -> TokenHistory:
    """Return a sequence's distinct tokens. All of its tokens are known: steps of sequences with
    penalties do not overlap."""
    counts = sequence.counts
    counts.update(sequence.token_ids, sequence.num_prompt)
    return TokenHistory(np.array(counts.ids, np.int32), np.array(counts.generated, np.float32))


def _scoring(sequence: Sequence, stop: int) -> Scoring | None:
    """Return which tokens of the prompt are still to be scored with the rows before ``stop``."""
    num_top = sequence.request.params.prompt_logprobs
    assert num_top is not None
    first = max(sequence.num_computed, len(sequence.scored))
    last = min(stop, sequence.num_prompt - 1)
    if first >= last:
        return None
    return Scoring(first, tuple(sequence.token_ids[first + 1 : last + 1]), num_top)
