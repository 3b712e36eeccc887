"""Chooses sequences that sit a step out, so that its masks do not take too long."""

from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence


def resting_sequences(running: SequenceOf[Sequence], max_step_mask_s: float) -> set[int]:
    """Return the ids of sequences that sit a step out. Their masks cost more than their share, and
    all masks together would cost more than ``max_step_mask_s``.

    They take turns: those that have rested longest go on, as many as fit, and one at least.
    """
    masked = [sequence for sequence in running if sequence.mask_s]
    left_s = max_step_mask_s
    if sum(sequence.mask_s for sequence in masked) <= left_s:
        return set()
    share_s = left_s / len(masked)
    costly = [sequence for sequence in masked if sequence.mask_s > share_s]
    left_s -= sum(sequence.mask_s for sequence in masked if sequence.mask_s <= share_s)
    resting: set[int] = set()
    for number, sequence in enumerate(sorted(costly, key=lambda each: -each.steps_rested)):
        if number and sequence.mask_s > left_s:
            sequence.steps_rested += 1
            resting.add(sequence.seq_id)
        else:
            sequence.steps_rested = 0
            left_s -= sequence.mask_s
    return resting
