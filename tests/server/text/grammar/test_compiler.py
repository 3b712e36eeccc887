import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.text.conversation import Channel, OutputFormat, Tool
from server.text.grammar import compiler as module
from server.text.grammar import estimate
from server.text.grammar import matcher as grammar_matcher
from server.text.grammar.compiler import (
    GrammarCache,
    GrammarCompiler,
)
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.matcher import LEXER_BYTES
from server.text.grammar.vocabulary import GrammarTokenizer, Vocabulary
from server.text.grammar.worker import GrammarsFullError
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.text.grammars import (
    LIMITS,
    MODEL_SIZE,
    WorkerHere,
    allowed_ids,
    compiler,
    follows,
    takes,
    vocabulary,
)

NUMBER = ConstraintSpec(OutputFormat("json_schema", {"type": "integer"}))


class Watched:
    """A compiler, and what it has had estimated."""

    def __init__(self, tokenizer: Tokenizer, **limits: Any) -> None:
        self.compiler = GrammarCompiler(
            vocabulary(tokenizer), self._made, replace(LIMITS, **limits)
        )
        self.worker: WorkerHere | None = None

    def _made(self, tokenizer: GrammarTokenizer) -> WorkerHere:
        self.worker = WorkerHere(tokenizer)
        return self.worker

    @property
    def estimated(self) -> int:
        """Forms that were estimated."""
        return 0 if self.worker is None else len(self.worker.estimated)


@pytest.mark.parametrize(
    "spec",
    [
        ConstraintSpec(),
        ConstraintSpec(tools=(Tool("a"),)),
        ConstraintSpec(must_call=True),
        ConstraintSpec(thinking_budget=3),
        ConstraintSpec(first_channel=Channel.REASONING),
    ],
)
async def test_where_nothing_is_wished_nothing_is_made(
    tokenizer: Tokenizer, spec: ConstraintSpec
) -> None:
    made = Watched(tokenizer)
    assert await made.compiler.compile(spec) is None
    assert made.worker is None
    await made.compiler.close()


async def test_a_budget_of_thoughts_alone_needs_no_compiler(tokenizer: Tokenizer) -> None:
    made = Watched(tokenizer)
    constraint = await made.compiler.compile(
        ConstraintSpec(first_channel=Channel.REASONING, thinking_budget=1)
    )
    assert constraint is not None
    assert allowed_ids(constraint) is None
    assert made.worker is None


async def test_a_form_is_estimated_once_and_the_oldest_is_forgotten(tokenizer: Tokenizer) -> None:
    made = Watched(tokenizer, max_kept=2)
    specs = [ConstraintSpec(OutputFormat("choice", [name])) for name in "abc"]
    for place in (0, 1, 0, 1, 2, 1, 0):
        constraint = await made.compiler.compile(specs[place])
        assert constraint is not None
        assert takes(constraint, tokenizer, "abc"[place])
    assert made.estimated == 4, "a was forgotten when c came"


async def test_a_form_that_is_kept_no_longer_is_estimated_again_and_its_answers_go_on(
    tokenizer: Tokenizer,
) -> None:
    made = Watched(tokenizer)
    held = await made.compiler.compile(NUMBER)
    made.compiler.forget()
    assert await made.compiler.compile(NUMBER) is not None
    assert made.estimated == 2
    assert held is not None
    assert takes(held, tokenizer, "12")


async def test_many_who_ask_at_once_for_a_form_wait_for_one_estimate(tokenizer: Tokenizer) -> None:
    made = Watched(tokenizer)
    specs = [ConstraintSpec(OutputFormat("regex", f"a{{{n % 7 + 1}}}")) for n in range(40)]
    found = await asyncio.gather(*map(made.compiler.compile, specs))
    for number, constraint in enumerate(found):
        assert constraint is not None
        assert takes(constraint, tokenizer, "a" * (number % 7 + 1))
    assert made.estimated == 7


async def test_a_form_is_ready_for_the_next_one_although_the_first_who_asked_has_left(
    tokenizer: Tokenizer,
) -> None:
    made = Watched(tokenizer)
    first = asyncio.create_task(made.compiler.compile(NUMBER))
    while not made.estimated:
        await asyncio.sleep(0.001)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await made.compiler.compile(NUMBER) is not None
    assert made.estimated == 1


async def test_answers_to_the_same_wish_do_not_disturb_each_other(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    first, second = [await made.compile(NUMBER) for _ in range(2)]
    assert first is not None
    assert second is not None
    minus = tokenizer.fast.encode("-").ids[0]
    first.accept(minus)
    assert minus in (allowed_ids(second) or ())
    assert minus not in (allowed_ids(first) or ())


async def test_answers_have_only_so_much_memory_for_their_forms(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_WAIT_S", 0.1)
    made = compiler(tokenizer, replace(LIMITS, max_kept_bytes=3 * LEXER_BYTES - 1))
    first = await made.compile(ConstraintSpec(OutputFormat("choice", ["a"])))
    kept = await made.compile(ConstraintSpec(OutputFormat("choice", ["b"])))
    assert first is not None
    del kept  # nobody uses it: it gives way
    second = await made.compile(ConstraintSpec(OutputFormat("choice", ["c"])))
    assert second is not None
    with pytest.raises(GrammarsFullError):
        await made.compile(ConstraintSpec(OutputFormat("choice", ["d"])))
    assert takes(first, tokenizer, "a")
    monkeypatch.setattr(module, "MEMORY_WAIT_S", 10.0)
    waits = asyncio.create_task(made.compile(ConstraintSpec(OutputFormat("choice", ["d"]))))
    done, _ = await asyncio.wait({waits}, timeout=0.2)
    assert not done
    del first, second
    assert await waits is not None, "who waits gets what others give back"


async def test_memory_of_a_form_that_cannot_be_compiled_after_all_is_free_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise GrammarError("it is too large")

    monkeypatch.setattr(module, "MEMORY_WAIT_S", 0.1)
    made = compiler(tokenizer, replace(LIMITS, max_kept_bytes=2 * LEXER_BYTES - 1))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(module, "new_matcher", fails)
            with pytest.raises(GrammarError, match="it is too large"):
                await made.compile(NUMBER)
    assert await made.compile(NUMBER) is not None


async def test_a_form_that_came_to_its_limits_in_one_answer_is_fresh_for_the_next(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "warm_up", lambda _: None)  # which needs more than that
    monkeypatch.setattr(grammar_matcher, "MAX_LEXER_STATES", 30)
    for name in ("SHORT_TOKENS", "LONG_TOKENS"):
        monkeypatch.setattr(grammar_matcher, name, 1)
    made = compiler(tokenizer)
    spec = ConstraintSpec(OutputFormat("regex", "(ab|cd|ef){0,99}"))
    for _ in range(2):
        constraint = await made.compile(spec)
        assert constraint is not None
        assert takes(constraint, tokenizer, "abcd")
        with pytest.raises(Exception, match="too large"):
            follows(constraint, tokenizer.fast.encode("ab" * 60).ids)


@pytest.mark.parametrize(
    "spec",
    [
        ConstraintSpec(OutputFormat("json_schema", {"enum": ["x" * 1000]})),
        ConstraintSpec(OutputFormat("regex", "x" * 1000)),
        ConstraintSpec(tools=(Tool("a", parameters={"enum": ["x" * 1000]}),), must_call=True),
    ],
)
async def test_what_is_too_long_is_refused(tokenizer: Tokenizer, spec: ConstraintSpec) -> None:
    made = Watched(tokenizer, max_spec_bytes=1000)
    with pytest.raises(GrammarError, match="it has more than 1000 bytes") as caught:
        await made.compiler.compile(spec)
    assert caught.value.param == ("tools" if spec.tools else "response_format")
    assert made.worker is None


async def test_what_json_cannot_hold_is_refused(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for value in ({"minimum": float("nan")}, deep):
        with pytest.raises(GrammarError, match="not JSON, or nested too deeply"):
            await made.compile(ConstraintSpec(OutputFormat("json_schema", value)))
    while isinstance(deep, dict) and deep:
        deep = deep.pop("items")  # link by link: freeing it whole would recurse


async def test_a_tokenizer_that_cannot_be_read_refuses_every_form(tokenizer: Tokenizer) -> None:
    made = GrammarCompiler(
        Vocabulary(tokenizer, MODEL_SIZE, frozenset({VOCAB + 3})), WorkerHere, LIMITS
    )
    assert made.load().startswith("no form of answers can be enforced: the model has")
    with pytest.raises(GrammarError, match="no form of answers can be enforced: the model has"):
        await made.compile(NUMBER)
    budget = ConstraintSpec(first_channel=Channel.REASONING, thinking_budget=1)
    assert await made.compile(budget) is not None


# --- what would break the process --------------------------------------------------------------


def chain(length: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    parts: dict[str, Any] = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)
    }
    return {"$defs": {**parts, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


async def test_long_chains_of_references_do_not_overflow_the_stack(tokenizer: Tokenizer) -> None:
    made = compiler(tokenizer)
    constraint = await made.compile(ConstraintSpec(OutputFormat("json_schema", chain(2400))))
    assert constraint is not None
    assert takes(constraint, tokenizer, "[]")
    rules = "\n".join(f'R{n}: "a" R{n + 1}' for n in range(400))
    lark = f'start: R0\n{rules}\nR400: "b"'
    constraint = await made.compile(ConstraintSpec(OutputFormat("grammar", lark)))
    assert constraint is not None
    assert takes(constraint, tokenizer, "a" * 400 + "b")


def test_refusals_are_remembered_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 2)
    cache = GrammarCache(max_bytes=10, max_grammars=9)
    for digest in (b"1", b"2", b"3"):
        cache.refuse(digest, GrammarError("why", "tools"))
    assert cache.get(b"1") is None
    found = cache.get(b"3")
    assert isinstance(found, GrammarError)
    assert (str(found), found.param) == ("why", "tools")
