"""Constraints by hand: whether they take a text, and what comes out when anything goes."""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from engine.types import TokenConstraint
from server.text.conversation import OutputFormat
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.constraints import CompiledGrammar, GrammarConstraint
from server.text.grammar.estimate import CostEstimate, Tokens, estimate_cost
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import new_matcher
from server.text.grammar.vocabulary import GrammarTokenizer, Vocabulary
from server.text.grammar.worker import GrammarLimits, GrammarWorker
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer

# The model's output is padded beyond the tokenizer's tokens.
MODEL_SIZE = 1024
LIMITS = GrammarLimits(
    max_compile_s=10.0,
    max_memory_bytes=2**30,
    max_mask_s=10.0,
    max_kept=8,
    max_kept_bytes=2**30,
)
STOPS = ("<|im_end|>", "<|endoftext|>")
CALL_TAGS = ("<tool_call>", "</tool_call>")


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.fast.get_vocab()[stop] for stop in STOPS)


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, MODEL_SIZE, stop_ids(tokenizer))


class WorkerHere(GrammarWorker):
    """Judges in this process."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        super().__init__(tokenizer.text, tokenizer.facts, LIMITS)
        self._tokens = Tokens(tokenizer.engine, tokenizer.facts)
        self.estimated: list[str] = []

    async def estimate(self, form: str) -> CostEstimate:
        self.estimated.append(form)
        return estimate_cost(self._tokens, form, LIMITS.max_mask_s)


def compiler(tokenizer: Tokenizer, limits: GrammarLimits = LIMITS) -> GrammarCompiler:
    return GrammarCompiler(vocabulary(tokenizer), WorkerHere, limits)


def grammar_constraint(
    words: Vocabulary, text: str, max_mask_s: float = LIMITS.max_mask_s
) -> GrammarConstraint:
    """text: a grammar as the grammar engine takes it."""
    matcher = new_matcher(GrammarTokenizer(words).engine, text)
    return GrammarConstraint(CompiledGrammar(matcher, 0), words.words, max_mask_s)


def tagged_tokenizer(folder: Path, *, special: bool) -> Tokenizer:
    """One that has a token for each of the tags around calls."""
    write_tokenizer(folder, VOCAB)
    file = str(folder / "tokenizer.json")
    fast = FastTokenizer.from_file(file)
    fast.add_tokens([AddedToken(tag, normalized=False, special=special) for tag in CALL_TAGS])
    fast.save(file)
    return Tokenizer(folder)


async def left_out(made: GrammarCompiler, spec: ConstraintSpec) -> tuple[str, ...]:
    """What a compiler leaves to the model."""
    grammar = await made.grammar(spec)
    return () if grammar is None else grammar.not_enforced


async def compiled(tokenizer: Tokenizer, spec: ConstraintSpec) -> TokenConstraint:
    constraint = await compiler(tokenizer).compile(spec)
    assert constraint is not None
    return constraint


async def of_schema(tokenizer: Tokenizer, schema: Any) -> TokenConstraint:
    return await compiled(tokenizer, ConstraintSpec(OutputFormat("json_schema", schema)))


async def refusal(tokenizer: Tokenizer, spec: ConstraintSpec) -> GrammarError:
    try:
        await compiled(tokenizer, spec)
    except GrammarError as error:
        return error
    raise AssertionError("nothing was refused")


def allowed_ids(constraint: TokenConstraint) -> list[int] | None:
    """The tokens that may come next; None: all."""
    row = np.full(MODEL_SIZE // 32, 0xA5A5A5A5, np.uint32)
    if not constraint.fill_mask(row):
        return None
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def follows(constraint: TokenConstraint, ids: Iterable[int]) -> bool:
    """Whether all tokens are allowed, one after the other."""
    for token in ids:
        allowed = allowed_ids(constraint)
        if allowed is not None and token not in allowed:
            return False
        constraint.accept(token)
    return True


def takes(constraint: TokenConstraint, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is a whole answer."""
    constraint = deepcopy(constraint)
    ids = tokenizer.fast.encode(text, add_special_tokens=False).ids
    return follows(constraint, [*ids, min(stop_ids(tokenizer))])


def wander(
    constraint: TokenConstraint, tokenizer: Tokenizer, rng: Random, most: int = 4000
) -> list[int] | None:
    """An answer of tokens drawn at random from what is allowed, without the one that ends it; None
    when it does not come to an end."""
    constraint = deepcopy(constraint)
    stops = stop_ids(tokenizer)
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = allowed_ids(constraint)
        token = rng.choice(range(VOCAB) if allowed is None else allowed)
        constraint.accept(token)
        if token in stops:
            return tokens
        tokens.append(token)
    return None


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
