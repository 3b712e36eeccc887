"""Advice for clients, in a file that ``quire launch`` imports without the wire models."""

# The advised length of an answer is context length / ANSWER_PART, up to MAX_ANSWER_TOKENS.
ANSWER_PART = 4
MAX_ANSWER_TOKENS = 16384


def advised_answer_tokens(context: int) -> int:
    """Return the advised maximum of an answer's tokens for a context length in tokens."""
    return min(context // ANSWER_PART, MAX_ANSWER_TOKENS)
