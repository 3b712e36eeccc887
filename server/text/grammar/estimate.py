"""Estimates the cost of a grammar by compiling it, in a process with limits (``worker.py``). This
module never imports numpy, MLX or the engine, because that process is forked."""

import resource
import sys
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer

from server.text.grammar.constraint_spec import ConstraintSpec, spec_of_json
from server.text.grammar.grammar_errors import GrammarError, Relaxation, limit_of
from server.text.grammar.matcher import deep_threads, new_matcher, try_matcher, warm_up
from server.text.grammar.text import TokenizerFacts, grammar_text

# The number of bytes in one unit of ``ru_maxrss``.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Tokens:
    """The worker's tokenizer in llguidance's form, with plain facts about it."""

    engine: LLTokenizer
    facts: TokenizerFacts


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """The cost of compiling a grammar, or the reason for refusing the grammar."""

    grammar: str = ""
    """The grammar's text in llguidance's format."""
    memory_bytes: int = 0
    """Peak memory that compiling the grammar takes."""
    refusal: str | None = None
    """A text for clients that says why the grammar cannot be enforced, or None if it can."""
    param: str | None = None
    """The request's field that causes the refusal, or None."""
    not_enforced: list[str] = field(default_factory=list)
    """Keywords of schemas that the grammar does not enforce, with their places."""


def read_tokens(tokenizer: str, facts: dict[str, Any]) -> Tokens:
    """Read a tokenizer in JSON. ``facts`` are the fields of TokenizerFacts."""
    tokens = TokenizerFacts(**facts)
    engine = LLTokenizer(tokenizer, tokens.size, tokens.stop_ids)
    warm_up(engine)  # allocates memory that forked processes inherit
    return Tokens(engine, tokens)


def estimate_cost(tokens: Tokens, spec_text: str, max_mask_s: float) -> CostEstimate:
    """Compile a ConstraintSpec in JSON, and try its grammar on the first tokens of some answers.
    Before each token, the search for allowed tokens may take ``max_mask_s`` of processor time."""
    spec = spec_of_json(spec_text)
    try:
        with deep_threads(1) as thread:
            # Reading inherited pages adds to the child's memory, so read them before measuring.
            thread.submit(warm_up, tokens.engine).result()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            trial = thread.submit(_try_grammar, spec, tokens, max_mask_s)
            grammar, not_enforced = trial.result()
    except GrammarError as error:
        return CostEstimate(refusal=str(error), param=error.param or spec.param)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return CostEstimate(grammar, grown * MAXRSS_BYTES, not_enforced=not_enforced)


def _try_grammar(
    spec: ConstraintSpec, tokens: Tokens, max_mask_s: float, *, probes: bool = False
) -> tuple[str, list[str]]:
    """Return a grammar's text, and the keywords of schemas that it does not enforce."""
    relaxation = Relaxation(probes=probes)
    try:
        grammar = grammar_text(spec, tokens.facts, relaxation)
        try_matcher(tokens.engine, new_matcher(tokens.engine, grammar), max_mask_s)
    except GrammarError as error:
        if probes or error.place or limit_of(str(error)):
            raise
        return _try_grammar(spec, tokens, max_mask_s, probes=True)
    return grammar, relaxation.not_enforced
