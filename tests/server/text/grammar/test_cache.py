import pytest
from llguidance import LLMatcher

from server.text.grammar import cache as module
from server.text.grammar.cache import CompiledGrammar, GrammarCache, Refusal
from server.text.grammar.vocabulary import GrammarTokenizer
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import vocabulary


@pytest.fixture(scope="module")
def matcher(tokenizer: Tokenizer) -> LLMatcher:
    return LLMatcher(GrammarTokenizer(vocabulary(tokenizer)).engine, 'start: "a"')


def kept(cache: GrammarCache, digest: bytes, matcher: LLMatcher, size: int) -> CompiledGrammar:
    assert cache.reserve(size)
    grammar = CompiledGrammar(matcher, size)
    cache.keep(digest, grammar)
    return grammar


def test_grammars_count_until_nobody_has_them(matcher: LLMatcher) -> None:
    cache = GrammarCache(max_bytes=10, max_grammars=1)
    first = kept(cache, b"1", matcher, 4)
    kept(cache, b"2", matcher, 4)
    assert cache.get(b"1") is None, "only one is kept"
    assert cache.used_bytes == 8
    assert not cache.reserve(7)
    assert cache.get(b"2") is None, "who is only kept gives way"
    assert cache.used_bytes == 4
    del first
    assert cache.used_bytes == 0


def test_memory_of_a_grammar_that_was_not_made_is_free_again() -> None:
    cache = GrammarCache(max_bytes=10, max_grammars=1)
    cache.reserve(10)
    cache.release(10)
    assert cache.used_bytes == 0


def test_the_oldest_goes_first(matcher: LLMatcher) -> None:
    cache = GrammarCache(max_bytes=10, max_grammars=9)
    for digest in (b"1", b"2"):
        kept(cache, digest, matcher, 4)
    assert isinstance(cache.get(b"1"), CompiledGrammar)
    kept(cache, b"3", matcher, 4)
    assert cache.get(b"2") is None
    assert isinstance(cache.get(b"1"), CompiledGrammar)


def test_a_spent_grammar_is_forgotten(matcher: LLMatcher) -> None:
    cache = GrammarCache(max_bytes=10, max_grammars=9)
    kept(cache, b"1", matcher, 4).is_spent = True
    assert cache.get(b"1") is None
    assert cache.used_bytes == 0


def test_refusals_are_remembered_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 2)
    cache = GrammarCache(max_bytes=10, max_grammars=9)
    for digest in (b"1", b"2", b"3"):
        cache.refuse(digest, Refusal("why", "tools"))
    assert cache.get(b"1") is None
    found = cache.get(b"3")
    assert isinstance(found, Refusal)
    assert (found.message, found.param) == ("why", "tools")
