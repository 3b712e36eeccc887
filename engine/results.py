"""Adds what a step made of an entry to its sequence: tokens, scores, vectors, ends."""

from engine.step_plan import Outcome, RowError, Scores, Vector
from engine.types import FinishReason, Sequence, TokenEvent

NO_MEMORY = "the system has no memory for it"


def apply_outcome(sequence: Sequence, outcome: Outcome) -> TokenEvent | None:
    """Add an outcome to its sequence. Return the event, with ``finish`` where the sequence ends;
    None while there is nothing to report."""
    if isinstance(outcome, Scores):
        sequence.scored += outcome.logprobs
        return None if outcome.then is None else apply_outcome(sequence, outcome.then)
    if isinstance(outcome, RowError):
        return end(sequence, FinishReason.ERROR, outcome.message)
    if isinstance(outcome, Vector):
        return end(sequence, FinishReason.STOP)._replace(embedding=outcome.values)
    tokens, params = sequence.token_ids, sequence.request.params
    first, scores = len(tokens) == sequence.num_prompt, None
    if first and params.prompt_logprobs is not None:
        scores = (None, *sequence.scored)
        if params.max_tokens == 0:
            return end(sequence, FinishReason.LENGTH)._replace(prompt_logprobs=scores)
    token = outcome.token_id
    tokens.append(token)
    finish = None
    if token in params.stop_token_ids:
        finish = FinishReason.STOP
    elif len(tokens) >= sequence.max_tokens:
        finish = FinishReason.LENGTH
    prefix = sequence.prefix if first or finish is not None else None
    return TokenEvent(sequence.seq_id, token, finish, outcome.logprobs, None, prefix, scores)


def end(sequence: Sequence, reason: FinishReason, message: str | None = None) -> TokenEvent:
    """Return the event of a sequence's end, without a token."""
    return TokenEvent(sequence.seq_id, None, reason, None, message, sequence.prefix)
