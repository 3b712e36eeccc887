import json
from pathlib import Path

import pytest

from server.text.grammar.constraints import LazyCalls
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.text.grammars import (
    allowed_ids,
    follows,
    grammar_constraint,
    stop_ids,
    tagged_tokenizer,
    takes,
    vocabulary,
)


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


def test_outside_of_calls_the_answer_may_end(caller: Tokenizer) -> None:
    constraint = lazy(caller)
    assert stop_ids(caller) < set(allowed_ids(constraint) or ())
    assert len(allowed_ids(constraint) or ()) >= VOCAB


def test_copies_call_for_themselves(caller: Tokenizer) -> None:
    first = lazy(caller)
    second = first.copy()
    assert follows(first, caller.fast.encode("<tool_call>1").ids)
    assert takes(second, caller, "no call")
