import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from server.conversation import OutputFormat, Tool
from server.text.grammar import compiler as grammar_compiler
from server.text.grammar.compiler import GrammarCompiler, Wish, deep_threads
from server.text.grammar.error import GrammarError
from server.text.grammar.thoughts import ThinkingStart, ThoughtConstraint
from server.text.grammar.vocabulary import Vocabulary, VocabularyError
from server.text.tokenizer import Tokenizer
from tests.server.text.grammars import LIMITS, allowed_ids, compiler, takes, vocabulary

NUMBER = Wish(OutputFormat("json_schema", {"type": "integer"}))


@pytest.mark.parametrize(
    "wish",
    [
        Wish(),
        Wish(tools=(Tool("a"),)),
        Wish(must_call=True),
        Wish(thinking_budget=3),
        Wish(thinking=ThinkingStart.THINKING),
    ],
)
async def test_where_nothing_is_wished_nothing_is_made(tokenizer: Tokenizer, wish: Wish) -> None:
    def never() -> Vocabulary:
        raise AssertionError("no vocabulary is needed")

    assert await GrammarCompiler(never, LIMITS).compile(wish) is None


async def test_thoughts_come_before_the_form(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    thinking = await made.compile(replace(NUMBER, thinking=ThinkingStart.THINKING))
    assert isinstance(thinking, ThoughtConstraint)
    assert takes(thinking, tokenizer, "well</think>\n12")
    budget = await made.compile(Wish(thinking=ThinkingStart.THINKING, thinking_budget=1))
    assert budget is not None
    assert allowed_ids(budget) is None
    made.close()


async def test_the_same_wish_is_compiled_once_and_the_oldest_is_forgotten(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    real = grammar_compiler.compiled

    def counting(text: str, *others: Any) -> Any:
        texts.append(text)
        return real(text, *others)

    monkeypatch.setattr(grammar_compiler, "compiled", counting)
    made = compiler(tokenizer, replace(LIMITS, max_cached=2))
    wishes = [Wish(OutputFormat("choice", [name])) for name in "abc"]
    for place in (0, 1, 0, 1, 2, 1, 0):
        constraint = await made.compile(wishes[place])
        assert constraint is not None
        assert takes(constraint, tokenizer, "abc"[place])
    assert len(texts) == 4, "a was forgotten when c came"
    made.close()


async def test_answers_to_the_same_wish_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    first, second = [await made.compile(NUMBER) for _ in range(2)]
    assert first is not None
    assert second is not None
    minus = tokenizer.fast.encode("-").ids[0]
    first.accept(minus)
    assert minus in (allowed_ids(second) or ())
    assert minus not in (allowed_ids(first) or ())
    made.close()


async def test_many_may_wish_at_once(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    wishes = [Wish(OutputFormat("regex", f"a{{{n % 7 + 1}}}")) for n in range(40)]
    found = await asyncio.gather(*map(made.compile, wishes))
    for number, constraint in enumerate(found):
        assert constraint is not None
        assert takes(constraint, tokenizer, "a" * (number % 7 + 1))
    made.close()


@pytest.mark.parametrize(
    "wish",
    [
        Wish(OutputFormat("json_schema", {"enum": ["x" * 1000]})),
        Wish(OutputFormat("regex", "x" * 1000)),
        Wish(tools=(Tool("a", parameters={"enum": ["x" * 1000]}),), must_call=True),
    ],
)
async def test_what_is_too_long_is_refused(tokenizer: Tokenizer, wish: Wish) -> None:
    made = compiler(tokenizer, replace(LIMITS, max_bytes=1000))
    with pytest.raises(GrammarError, match="it has more than 1000 bytes") as caught:
        await made.compile(wish)
    assert caught.value.param == ("tools" if wish.tools else "response_format")
    made.close()


async def test_what_json_cannot_hold_is_refused(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for value in ({"minimum": float("nan")}, deep):
        with pytest.raises(GrammarError, match="not JSON, or nested too deeply"):
            await made.compile(Wish(OutputFormat("json_schema", value)))
    made.close()
    while isinstance(deep, dict) and deep:
        deep = deep.pop("items")  # link by link: freeing it whole would recurse


async def test_compiling_has_a_time_limit_and_others_need_not_wait(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = grammar_compiler.compiled

    def slow(text: str, *others: Any) -> Any:
        if "slow" in text:
            release.wait(30)
        return real(text, *others)

    monkeypatch.setattr(grammar_compiler, "compiled", slow)
    made = compiler(tokenizer, replace(LIMITS, max_compile_s=1.0))
    stuck = asyncio.create_task(made.compile(Wish(OutputFormat("choice", ["slow"]))))
    assert await made.compile(NUMBER) is not None
    with pytest.raises(GrammarError, match=r"within 1 s"):
        await stuck
    release.set()
    made.close()


async def test_a_tokenizer_that_cannot_be_read_refuses_every_wish(tokenizer: Tokenizer) -> None:
    def broken() -> Vocabulary:
        raise VocabularyError("the ids of the model's tokenizer have gaps")

    made = GrammarCompiler(broken, LIMITS)
    with pytest.raises(GrammarError, match="no form of answers can be enforced: the ids"):
        await made.compile(NUMBER)
    made.close()


async def test_the_vocabulary_is_read_once(tokenizer: Tokenizer) -> None:
    reads = []

    def slow() -> Vocabulary:
        reads.append(time.monotonic())
        time.sleep(0.05)
        return vocabulary(tokenizer)

    made = GrammarCompiler(slow, LIMITS)
    await asyncio.gather(*(made.compile(NUMBER) for _ in range(5)))
    assert len(reads) == 1
    made.close()


def test_a_compiler_that_was_never_used_closes() -> None:
    GrammarCompiler(lambda: pytest.fail("not needed"), LIMITS).close()


def test_a_grammar_that_has_no_first_token_is_refused(tokenizer: Tokenizer) -> None:
    schema = {"const": "\x01", "x-guidance": {"json_allowed_escapes": "n"}}
    text = json.dumps({"grammars": [{"json_schema": schema}]})
    with pytest.raises(GrammarError, match="no answer can satisfy it"):
        grammar_compiler.compiled(text, vocabulary(tokenizer), "response_format")


# --- what would break the process --------------------------------------------------------------


def chain(length: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    parts: dict[str, Any] = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)
    }
    return {"$defs": {**parts, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


async def test_long_chains_of_references_do_not_overflow_the_stack(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    constraint = await made.compile(Wish(OutputFormat("json_schema", chain(2400))))
    assert constraint is not None
    assert takes(constraint, tokenizer, "[]")
    rules = "\n".join(f'R{n}: "a" R{n + 1}' for n in range(400))
    lark = f'start: R0\n{rules}\nR400: "b"'
    constraint = await made.compile(Wish(OutputFormat("grammar", lark)))
    assert constraint is not None
    assert takes(constraint, tokenizer, "a" * 400 + "b")
    made.close()


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    executor = deep_threads()
    assert threading.stack_size() == before
    assert executor.submit(lambda: 3).result(5) == 3
    executor.shutdown()
