import json
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np
import pytest

from engine.types import FormLimitError, TokenConstraint
from server.text.conversation import Channel
from server.text.grammar.constraints import (
    ConstraintError,
    GrammarConstraint,
    LazyCalls,
    ReasoningConstraint,
    TagWatch,
)
from server.text.grammar.grammar_errors import GrammarError, UnfitBeginningError
from server.text.grammar.vocabulary import Vocabulary
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB, Scripted
from tests.models import TINY, write_tokenizer
from tests.server.harness import token_id
from tests.server.text.grammars import (
    allowed_ids,
    follows,
    grammar_constraint,
    stop_ids,
    tagged_tokenizer,
    takes,
    vocabulary,
    wander,
)

TAG = b"<tool_call>"


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary(tokenizer)


def of_lark(words: Vocabulary, lark: str, max_mask_s: float = 10.0) -> GrammarConstraint:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    return grammar_constraint(words, grammar, max_mask_s)


def test_only_what_the_grammar_allows_comes_next_and_then_the_end(
    words: Vocabulary, tokenizer: Tokenizer
) -> None:
    constraint = of_lark(words, 'start: "ab" | "ac"')
    assert takes(constraint, tokenizer, "ab")
    assert not takes(constraint, tokenizer, "a")
    assert not takes(constraint, tokenizer, "abc")
    assert allowed_ids(constraint) == [token_id(tokenizer, "a")]
    constraint.accept(token_id(tokenizer, "a"))
    assert not constraint.complete
    constraint.accept(token_id(tokenizer, "c"))
    assert constraint.complete
    assert set(allowed_ids(constraint) or ()) == stop_ids(tokenizer)


@pytest.mark.parametrize(
    "text", ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
)
@pytest.mark.parametrize("length", [1, 3, 5, 12])
def test_no_added_token_stands_within_a_string(tmp_path: Path, text: str, length: int) -> None:
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    write_tokenizer(tmp_path, TINY.vocab_size, plain=plain)
    tokenizer = Tokenizer(tmp_path)
    schema = json.dumps({"grammars": [{"json_schema": {"type": "string", "maxLength": length}}]})
    constraint = grammar_constraint(vocabulary(tokenizer), schema)
    constraint.accept(token_id(tokenizer, '"'))
    assert token_id(tokenizer, "a") in (allowed_ids(constraint) or ())
    assert token_id(tokenizer, text) not in (allowed_ids(constraint) or ())


def test_an_answer_that_is_begun_goes_on_where_it_ends(
    words: Vocabulary, tokenizer: Tokenizer
) -> None:
    constraint = of_lark(words, "start: /[a-z]{40}/")
    first = constraint.after(tokenizer.fast.encode("x" * 38).ids, 10.0)
    second = deepcopy(first)
    assert follows(first, tokenizer.fast.encode("cd").ids)
    assert first.complete
    assert follows(second, tokenizer.fast.encode("yz").ids)
    assert takes(constraint, tokenizer, "a" * 40), "it has not begun"
    over = constraint.after(tokenizer.fast.encode("x" * 40).ids, 10.0)
    assert set(allowed_ids(over) or ()) == stop_ids(tokenizer)


def test_a_beginning_that_is_not_allowed_is_no_fault_of_the_grammar(
    words: Vocabulary, tokenizer: Tokenizer
) -> None:
    constraint = of_lark(words, "start: /[a-z]{40}/")
    for text in ("x" * 20 + "X", "x" * 41):
        with pytest.raises(UnfitBeginningError):
            constraint.after(tokenizer.fast.encode(text).ids, 10.0)
    assert takes(constraint, tokenizer, "a" * 40)


def test_a_beginning_that_takes_too_much_is_refused(
    words: Vocabulary, tokenizer: Tokenizer
) -> None:
    constraint = of_lark(words, "start: /[a-z]*/")
    with pytest.raises(GrammarError, match="more than 0 s"):
        constraint.after(tokenizer.fast.encode("x" * 40).ids, 0.0)
    tiring = of_lark(words, "start: /(([a-z]{1,99}){1,99}){1,99}/")
    with pytest.raises(GrammarError, match="too large"):
        tiring.after(tokenizer.fast.encode("x" * 4000).ids, 10.0)


def test_padding_and_special_tokens_are_never_allowed_in_text(
    words: Vocabulary, tokenizer: Tokenizer
) -> None:
    allowed = allowed_ids(of_lark(words, "start: /(?s:.*)/"))
    assert allowed is not None
    assert max(allowed) < tokenizer.vocab_size
    assert token_id(tokenizer, "<|im_start|>") not in allowed


def test_a_token_that_is_not_allowed_is_a_fault(words: Vocabulary, tokenizer: Tokenizer) -> None:
    constraint = of_lark(words, 'start: "ab"')
    constraint.accept(token_id(tokenizer, "x"))
    for _ in range(2):
        with pytest.raises(ConstraintError, match="does not allow"):
            constraint.fill_mask(np.zeros(words.words, np.uint32))


def test_a_grammar_that_leads_nowhere_is_a_fault(words: Vocabulary, tokenizer: Tokenizer) -> None:
    endless = {"a": {"$ref": "#/$defs/a"}}
    schema = {"type": "object", "properties": endless, "required": ["a"], "$defs": endless}
    constraint = grammar_constraint(words, json.dumps({"grammars": [{"json_schema": schema}]}))
    assert follows(constraint, tokenizer.fast.encode('{"a":').ids)
    with pytest.raises(ConstraintError, match="allows no token"):
        allowed_ids(constraint)


def test_masks_that_take_too_long_are_the_forms_fault_but_one_alone_is_not(
    words: Vocabulary,
) -> None:
    constraint = of_lark(words, 'start: "ab"', max_mask_s=0.0)
    assert allowed_ids(constraint)
    with pytest.raises(FormLimitError, match="more than 0 s"):
        allowed_ids(constraint)


# --- tags ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"a<tool_call>", b"<<tool_call>b", b"<tool<tool_call>", TAG * 2])
def test_a_tag_is_found_however_the_text_is_cut(text: bytes) -> None:
    end = text.find(TAG) + len(TAG)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            watch = TagWatch(TAG)
            found = []
            for piece in (text[:first], text[first:second], text[second:]):
                found.append(watch.feed(piece))
                if found[-1]:
                    break
            assert found[-1]
            assert [first, second, len(text)][len(found) - 1] >= end


@pytest.mark.parametrize(
    ("text", "matched"),
    [(b"", 0), (b"a<", 1), (b"<tool_cal", 9), (b"<tool x", 0), (b"<tool<", 1), (b"<a<tool", 5)],
)
def test_how_much_of_a_tag_is_there_is_known(text: bytes, matched: int) -> None:
    for cut in range(len(text) + 1):
        watch = TagWatch(TAG)
        assert not watch.feed(text[:cut])
        assert not watch.feed(text[cut:])
        assert watch.matched == matched


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


# --- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_tag_comes_when_the_budget_is_spent(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted, budget: int
) -> None:
    for seed in range(5):
        tokens = wander(thinking(deepcopy(answer), words, budget=budget), tokenizer, Random(seed))
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
    opened = deepcopy(constraint)
    assert follows(opened, [*spelt(tokenizer, " <thin"), *tokenizer.fast.encode("k>abc").ids[:4]])
    assert allowed_ids(opened) == [token_id(tokenizer, "</think>")]


def test_copies_think_for_themselves(
    words: Vocabulary, tokenizer: Tokenizer, answer: Scripted
) -> None:
    first = thinking(answer, words, budget=2)
    second = deepcopy(first)
    assert follows(first, tokenizer.fast.encode("ab</think>aa").ids)
    assert set(allowed_ids(second) or ()) == set(range(VOCAB)) - stop_ids(tokenizer)
    assert len(answer.accepted) == 2
    assert [copy.accepted for copy in answer.copies] == [[]]


def lazy(tokenizer: Tokenizer) -> LazyCalls:
    words = vocabulary(tokenizer)
    close = words.tokens("</tool_call>")
    tag = f"<[{close[0]}]>" if len(close) == 1 else '"</tool_call>"'
    lark = f"start: /[0-9]+/ {tag}"
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    return LazyCalls(grammar_constraint(words, grammar), words)


@pytest.fixture(params=["spelt", "special", "plain"])
def caller(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Tokenizer:
    """Tokenizers with and without tokens for the tags."""
    if request.param == "spelt":
        return tokenizer
    return tagged_tokenizer(tmp_path, special=request.param == "special")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "only text, with <tool and a <tool_calm>",
        "<tool_call>12</tool_call>",
        "well <tool_call>12</tool_call>\n<tool_call>3</tool_call> done",
    ],
)
def test_text_is_free_and_calls_have_their_form(caller: Tokenizer, text: str) -> None:
    assert takes(lazy(caller), caller, text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>x</tool_call>",
        "well <tool_call>1 2</tool_call>",
        "<tool_call>12</tool_call><tool_call>y</tool_call>",
    ],
)
def test_no_call_goes_its_own_way(caller: Tokenizer, text: str) -> None:
    assert not takes(lazy(caller), caller, text)
