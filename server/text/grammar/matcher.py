"""Compiles a grammar's text into llguidance's matcher, within limits of time and memory."""

import json
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.text.grammar.grammar_errors import GrammarError, meaning

# Stack size of threads that run llguidance, which recurses along references and rules.
STACK_BYTES = 256 * 1024**2
# Limit of a grammar's lexer states, which all its answers share. Real schemas need up to 3000.
MAX_LEXER_STATES = 8192
# Memory for a grammar's lexer states. A state of a hard pattern took 512 bytes in a measurement.
LEXER_BYTES = MAX_LEXER_STATES * 512
# A trial of a grammar reads 16 answers of 4 tokens, and 4 answers of 16 tokens.
TRIED_BEGINNINGS, SHORT_TOKENS = 16, 4
TRIED_ANSWERS, LONG_TOKENS = 4, 16
FIRST_GRAMMAR = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar, and compute which tokens may come first. Raises GrammarError."""
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    _mask(matcher)
    return matcher


def try_matcher(tokenizer: LLTokenizer, matcher: LLMatcher, max_mask_s: float) -> None:
    """Try a grammar on the first tokens of some fixed answers. Raises GrammarError if the grammar
    reaches a limit, such as ``max_mask_s`` of processor time for finding the allowed tokens."""
    rng = random.Random(0)  # noqa: S311
    mask = _mask(matcher)
    letters = [token for byte in range(256) for token in tokenizer.tokenize_bytes(bytes([byte]))]
    begin = [token for token in letters if mask[token // 8] >> token % 8 & 1]
    for token in rng.sample(begin, min(len(begin), TRIED_BEGINNINGS)):
        _follow(matcher.deep_copy(), token, SHORT_TOKENS, max_mask_s, rng)
    for _ in range(TRIED_ANSWERS):
        _follow(matcher.deep_copy(), _any_token(mask, rng), LONG_TOKENS, max_mask_s, rng)


def warm_up(tokenizer: LLTokenizer) -> None:
    """Compile a first grammar, because llguidance allocates some memory once per process."""
    try_matcher(tokenizer, new_matcher(tokenizer, FIRST_GRAMMAR), math.inf)


def _follow(
    answer: LLMatcher, token: int, tokens: int, max_mask_s: float, rng: random.Random
) -> None:
    """Try a grammar on several tokens of an answer that begins with ``token``."""
    for _ in range(tokens):
        started_s = time.thread_time()
        if not answer.consume_token(token):
            raise GrammarError(meaning(answer.get_error()))
        if answer.is_stopped():
            return
        token = _any_token(_mask(answer), rng)
        if time.thread_time() - started_s > max_mask_s:
            raise GrammarError(f"a token of the answer takes more than {max_mask_s:g} s")


def deep_threads(count: int) -> ThreadPoolExecutor:
    """Make a pool of threads with stacks that are large enough for llguidance."""
    executor = ThreadPoolExecutor(count, thread_name_prefix="grammar")
    all_here = threading.Barrier(count + 1)
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            executor.submit(all_here.wait)
        all_here.wait()
    finally:
        threading.stack_size(before)
    return executor


def _mask(matcher: LLMatcher) -> bytes:
    """Return a mask with one bit per token, set if allowed. Raises GrammarError on failure."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(meaning(matcher.get_error()))
    return mask


def _any_token(mask: bytes, rng: random.Random) -> int:
    start = rng.randrange(len(mask))
    around = mask[start:] + mask[:start]
    from_token = around.lstrip(b"\0")
    assert from_token, "a mask without a token is an error"
    place = (start + len(around) - len(from_token)) % len(mask)
    return 8 * place + rng.choice([bit for bit in range(8) if from_token[0] >> bit & 1])
