"""Find out whether a form of answers can be enforced, and at what cost."""

import json
import resource
import sys
from dataclasses import asdict, dataclass

from llguidance import LLTokenizer

from server.text.grammar.constraint_spec import ConstraintSpec, form_of_json
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import deep_threads, new_matcher, try_matcher, warm_up
from server.text.grammar.text import TokenizerFacts, grammar_text

# What getrusage counts memory in.
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokenizer that forms are judged for."""

    engine: LLTokenizer
    facts: TokenizerFacts


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a form."""

    grammar: str = ""
    """As the grammar engine takes it."""
    memory_bytes: int = 0
    """The most memory that it took."""
    refusal: str | None = None
    """Why it cannot be enforced; fit for clients."""
    param: str | None = None
    """The request's field that the refusal is of."""

    def to_json(self) -> bytes:
        """Write it for the process that asked."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: str) -> "Verdict":
        """Read what ``to_json`` has written."""
        return cls(**json.loads(text))


def judge(form: str, tokens: Tokens, max_mask_s: float) -> Verdict:
    """Compile a form, and follow it over the first tokens of some answers.

    form: of ``form_json``. max_mask_s: processor time that each of the tokens may take.
    """
    spec = form_of_json(form)
    try:
        with deep_threads(1) as thread:
            # Pages that a child only reads count as its own: they are read before.
            thread.submit(warm_up, tokens.engine).result()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grammar = thread.submit(_tried, spec, tokens, max_mask_s).result()
    except GrammarError as error:
        return Verdict(refusal=str(error), param=error.param or spec.param)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Verdict(grammar, grown * MAXRSS_BYTES)


def _tried(spec: ConstraintSpec, tokens: Tokens, max_mask_s: float) -> str:
    grammar = grammar_text(spec, tokens.facts)
    try_matcher(tokens.engine, new_matcher(tokens.engine, grammar), max_mask_s)
    return grammar
