"""Adds the results of a step to their sequences: tokens, scores, vectors, ends."""

from engine.step_plan import PlanEntry
from engine.types import FinishReason, Sampled, Sequence, TokenEvent

NOT_FINITE = "the model's output was not finite"
NO_MEMORY = "the system has no memory for it"


def take(entry: PlanEntry, result: Sampled) -> TokenEvent | None:
    """Add its result to the sequence. Return the event, with ``finish`` where the sequence ends;
    None while there is nothing to report."""
    sequence, token = entry.sequence, result.token_id
    if result.scored:
        sequence.scored += result.scored
    if token is None or not entry.samples or result.scored is None:
        return _without_token(entry, result)
    tokens, params = sequence.token_ids, sequence.request.params
    first, scores = len(tokens) == sequence.num_prompt, None
    if first and params.prompt_logprobs is not None:
        scores = (None, *sequence.scored)
        if params.max_tokens == 0:
            return end(sequence, FinishReason.LENGTH)._replace(prompt_logprobs=scores)
    tokens.append(token)
    finish = None
    if token in params.stop_token_ids:
        finish = FinishReason.STOP
    elif len(tokens) >= sequence.max_tokens:
        finish = FinishReason.LENGTH
    prefix = sequence.prefix if first or finish is not None else None
    return TokenEvent(sequence.seq_id, token, finish, result.logprobs, None, prefix, scores)


def _without_token(entry: PlanEntry, result: Sampled) -> TokenEvent | None:
    if result.scored is None:
        return end(entry.sequence, FinishReason.ERROR, NOT_FINITE)
    if not entry.samples:
        return None
    if result.embedding is None:
        return end(entry.sequence, FinishReason.ERROR, result.message or NOT_FINITE)
    return end(entry.sequence, FinishReason.STOP)._replace(embedding=result.embedding)


def end(sequence: Sequence, reason: FinishReason, message: str | None = None) -> TokenEvent:
    """Return the event of a sequence's end, without a token."""
    return TokenEvent(sequence.seq_id, None, reason, None, message, sequence.prefix)
