from random import Random

import pytest

from engine.types import TokenConstraint
from server.text.conversation import Channel
from server.text.grammar.constraints import ReasoningConstraint
from server.text.grammar.vocabulary import Vocabulary
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB, Scripted
from tests.server.harness import token_id
from tests.server.text.grammars import allowed_ids, follows, stop_ids, takes, vocabulary, wander

A = {ord("a") - ord("!")}


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary(tokenizer)


@pytest.fixture
def answer(tokenizer: Tokenizer) -> Scripted:
    """The letter a, twice, and the end."""
    letter = {token_id(tokenizer, "a")}
    return Scripted(lambda said: letter if len(said) < 2 else set(stop_ids(tokenizer)))


def thinking(
    answer: TokenConstraint | None,
    words: Vocabulary,
    start: Channel | None = Channel.REASONING,
    budget: int | None = None,
) -> ReasoningConstraint:
    return ReasoningConstraint(answer, words, start, budget)


def test_thoughts_are_free_but_cannot_end_the_answer(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    constraint = thinking(answer, words)
    assert set(allowed_ids(constraint) or ()) == set(range(VOCAB)) - stop_ids(tokenizer)
    assert takes(constraint, tokenizer, "whatever {] \n 😀</think>aa")
    assert not takes(constraint, tokenizer, "whatever")
    assert not takes(constraint, tokenizer, "whatever</think>a")
    assert not takes(constraint, tokenizer, "whatever</think>b")


@pytest.mark.parametrize("breaks", ["", "\n"])
def test_a_line_break_may_follow_the_thoughts_and_is_not_the_answers(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted, breaks: str
) -> None:
    constraint = thinking(answer, words)
    assert not takes(constraint, tokenizer, "so</think>\n\naa"), "but one token of them"
    ids = tokenizer.fast.encode(f"so</think>{breaks}aa").ids
    assert follows(constraint, ids)
    assert answer.accepted == [token_id(tokenizer, "a")] * 2


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Byte by byte, tags as well."""
    return [token for letter in text for token in tokenizer.fast.encode(letter).ids]


def test_a_tag_may_be_spelt_and_what_only_begins_like_one_is_none(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    constraint = thinking(answer, words)
    assert follows(constraint, spelt(tokenizer, "a </thin </ </think>aa"))
    assert len(answer.accepted) == 2


def test_a_prompt_that_leaves_it_open_may_be_answered_with_or_without_thoughts(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    constraint = thinking(answer, words, None)
    assert set(allowed_ids(constraint) or ()) == {
        token_id(tokenizer, "a"),
        token_id(tokenizer, "<think>"),
    }
    assert takes(constraint, tokenizer, "aa")
    assert takes(constraint, tokenizer, "<think>b</think>\naa")
    assert not takes(constraint, tokenizer, "a<think>b</think>a")


def test_where_no_token_opens_thoughts_the_answer_begins_at_once(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "open_id", None)
    constraint = thinking(answer, words, None)
    assert allowed_ids(constraint) == [token_id(tokenizer, "a")]
    assert takes(constraint, tokenizer, "aa")


def test_a_model_that_does_not_think_is_held_to_its_answer(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    assert takes(thinking(answer, words, Channel.CONTENT), tokenizer, "aa")


# --- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_tag_comes_when_the_budget_is_spent(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted, budget: int
) -> None:
    for seed in range(5):
        tokens = wander(thinking(answer.copy(), words, budget=budget), tokenizer, Random(seed))
        assert tokens is not None
        close = token_id(tokenizer, "</think>")
        assert tokens.index(close) == budget
        assert [t for t in tokens[budget + 1 :] if t != token_id(tokenizer, "\n")] == [
            token_id(tokenizer, "a")
        ] * 2


def test_a_tag_of_several_tokens_is_written_token_by_token(
    words: Vocabulary, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "close_ids", tuple(spelt(tokenizer, "</think>")))
    constraint = thinking(None, words, budget=3)
    assert follows(constraint, spelt(tokenizer, "x</"))
    for token in words.close_ids:
        assert allowed_ids(constraint) == [token]
        constraint.accept(token)
    assert allowed_ids(constraint) is None


def test_without_a_form_only_the_budget_holds(words: Vocabulary, tokenizer: Tokenizer) -> None:
    constraint = thinking(None, words, None, budget=2)
    assert takes(constraint, tokenizer, "anything")
    assert takes(constraint, tokenizer, "\n <think>ab</think>anything")
    assert takes(constraint, tokenizer, "<think>a</think>anything")
    assert takes(constraint, tokenizer, "<thin")
    assert not takes(constraint, tokenizer, "<think>abc</think>anything")
    opened = constraint.copy()
    assert follows(opened, [*spelt(tokenizer, " <thin"), *tokenizer.fast.encode("k>abc").ids[:4]])
    assert allowed_ids(opened) == [token_id(tokenizer, "</think>")]


def test_copies_think_for_themselves(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    first = thinking(answer, words, budget=2)
    second = first.copy()
    assert follows(first, tokenizer.fast.encode("ab</think>aa").ids)
    assert set(allowed_ids(second) or ()) == set(range(VOCAB)) - stop_ids(tokenizer)
    assert len(answer.accepted) == 2
    assert [copy.accepted for copy in answer.copies] == [[]]
