import json
import math
import threading

import pytest
from llguidance import LLTokenizer

from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import deep_threads, new_matcher, try_matcher
from server.text.grammar.vocabulary import GrammarTokenizer
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import vocabulary


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> LLTokenizer:
    return GrammarTokenizer(vocabulary(tokenizer)).engine


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def test_a_grammar_that_has_no_first_token_is_refused(engine: LLTokenizer) -> None:
    schema = {"const": "\x01", "x-guidance": {"json_allowed_escapes": "n"}}
    with pytest.raises(GrammarError, match="no answer can satisfy it"):
        new_matcher(engine, json.dumps({"grammars": [{"json_schema": schema}]}))


def test_what_begins_but_does_not_go_on_is_refused(engine: LLTokenizer) -> None:
    matcher = new_matcher(engine, lark("start: /(a?){500}a{500}/"))
    with pytest.raises(GrammarError, match="too large"):
        try_matcher(engine, matcher, math.inf)


def test_what_leads_nowhere_is_refused(engine: LLTokenizer) -> None:
    endless = {"a": {"$ref": "#/$defs/a"}}
    schema = {"type": "object", "properties": endless, "required": ["a"], "$defs": endless}
    matcher = new_matcher(engine, json.dumps({"grammars": [{"json_schema": schema}]}))
    with pytest.raises(GrammarError):
        try_matcher(engine, matcher, math.inf)


def test_what_takes_long_for_a_token_is_refused(engine: LLTokenizer) -> None:
    matcher = new_matcher(engine, lark('start: "ab"'))
    try_matcher(engine, matcher, math.inf)
    with pytest.raises(GrammarError, match="takes more than 0 s"):
        try_matcher(engine, matcher, 0.0)


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    with deep_threads(2) as threads:
        assert threading.stack_size() == before
        assert threads.submit(lambda: 3).result(5) == 3
