"""Grammars of answers in Harmony: what is reasoning is free, what is called or final is not."""

import json
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from engine.types import TokenConstraint
from server.text.calls.tool_format import ToolFormat
from server.text.conversation import Channel, OutputFormat, Tool
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.vocabulary import Vocabulary
from server.text.harmony import ANSWER_ENDS, TOKENS
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import SPECIAL_TOKENS, write_tokenizer
from tests.server.text.grammars import LIMITS, MODEL_SIZE, WorkerHere, allowed_ids, follows, text_of
from tests.templates import HARMONY_TEMPLATE

PLACE = Tool("place", parameters={
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
})  # fmt: skip
NOW = Tool("now", parameters={"type": "object", "additionalProperties": False})
STRICT = replace(PLACE, strict=True)
NEXT = "<|end|><|start|>assistant"
THINKS = f"<|channel|>analysis<|message|>Hm, <| 東?{NEXT}"
SAYS = f"<|channel|>commentary<|message|>Let me look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '{"city": "Oslo", "days": 3}'
CALL = f"<|channel|>commentary to=functions.place <|constrain|>json<|message|>{ARGUMENTS}"
OTHERS = (
    CALL.replace(" <|constrain|>json", ""),
    CALL.replace(" <|constrain|>", "<|constrain|>"),
    f" to=functions.place<|channel|>commentary json<|message|>{ARGUMENTS}",
)
YES_OR_NO = OutputFormat("json_schema", {"enum": ["yes", "no"]})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("harmony")
    write_tokenizer(folder, VOCAB, template=HARMONY_TEMPLATE, special=(*SPECIAL_TOKENS, *TOKENS))
    return Tokenizer(folder)


async def compiled(tokenizer: Tokenizer, spec: ConstraintSpec, begun: str = "") -> TokenConstraint:
    words = Vocabulary(tokenizer, MODEL_SIZE, tokenizer.answer_end_ids)
    made = GrammarCompiler(words, WorkerHere, LIMITS)
    constraint = await made.compile(replace(spec, tool_format=ToolFormat.HARMONY), begun)
    assert constraint is not None
    return constraint


def asked(
    *tools: Tool, output: OutputFormat | None = None, start: Channel | None = None, **fields: Any
) -> ConstraintSpec:
    return ConstraintSpec(output, tools, first_channel=start, **fields)


def takes(constraint: TokenConstraint, tokenizer: Tokenizer, text: str, end: str) -> bool:
    ids = tokenizer.fast.encode(text + end, add_special_tokens=False).ids
    return follows(deepcopy(constraint), ids)


async def check(
    tokenizer: Tokenizer, spec: ConstraintSpec, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    constraint = await compiled(tokenizer, spec)
    for text in right:
        for end in ANSWER_ENDS:
            assert takes(constraint, tokenizer, text, end), text
    for text in wrong:
        assert not takes(constraint, tokenizer, text, ANSWER_ENDS[0]), text


@pytest.mark.parametrize("before", ["", THINKS, THINKS + THINKS])
async def test_a_call_that_must_be_made_satisfies_its_schema(
    tokenizer: Tokenizer, before: str
) -> None:
    spec = asked(PLACE, NOW, must_call=True)
    now = CALL.replace("place", "now").replace(ARGUMENTS, "{}")
    right = [before + each for each in (CALL, *OTHERS, now)]
    wrong = [before + CALL.replace(*changed) for changed in (
        ("Oslo", "Bonn"), ("3", '"3"'), ("place", "now"), ("place", "python"), (FINAL, ""),
        ("functions.", ""), ("commentary", "analysis"), ("}", "}}"), (ARGUMENTS, ""),
    ) if changed[0] in CALL]  # fmt: skip
    texts = (
        f"{before}{SAYS}{CALL}",
        f"{before}{FINAL}Yes.",
        before,
        f"{before}{CALL}<|end|>",
        f"{before}Yes.",
    )
    await check(tokenizer, spec, tuple(right), (*wrong, *texts))


async def test_a_form_is_that_of_the_final_message(tokenizer: Tokenizer) -> None:
    spec = asked(output=YES_OR_NO)
    right = (f'{FINAL}"yes"', f'{THINKS}{FINAL}"no"')
    wrong = (f"{FINAL}perhaps", '"yes"', f'{THINKS}"yes"', THINKS, f'{FINAL}"yes"{NEXT}{FINAL}"no"',
             f'{SAYS}{FINAL}"no"', CALL, '<|channel|>commentary<|message|>"yes"')  # fmt: skip
    await check(tokenizer, spec, right, wrong)


async def test_a_form_and_tools_leave_the_model_the_choice(tokenizer: Tokenizer) -> None:
    spec = asked(PLACE, output=YES_OR_NO)
    call = f"{THINKS}{SAYS}{CALL.replace('3', 'true')}"
    await check(tokenizer, spec, (f'{THINKS}{FINAL}"no"', call), (f"{FINAL}perhaps", THINKS))


async def test_a_strict_tool_that_may_be_called_is_held_to_its_schema(
    tokenizer: Tokenizer,
) -> None:
    right = (f"{THINKS}{FINAL}Any <| text.", f"{SAYS}{CALL}", CALL.replace("place", "now"))
    await check(tokenizer, asked(STRICT, Tool("now")), right, (CALL.replace("Oslo", "Bonn"),))


async def test_a_message_that_is_begun_is_held_from_where_it_is(tokenizer: Tokenizer) -> None:
    final = await compiled(tokenizer, asked(output=YES_OR_NO, start=Channel.CONTENT), '"y')
    assert takes(final, tokenizer, 'es"', ANSWER_ENDS[0])
    assert not takes(final, tokenizer, 'no"', ANSWER_ENDS[0])
    free = await compiled(tokenizer, asked(STRICT, start=Channel.CONTENT))
    assert takes(free, tokenizer, "Yes.", ANSWER_ENDS[0])
    thoughts = await compiled(tokenizer, asked(output=YES_OR_NO, start=Channel.REASONING))
    assert takes(thoughts, tokenizer, f'm.{NEXT}{FINAL}"no"', ANSWER_ENDS[0])
    assert not takes(thoughts, tokenizer, '"no"', ANSWER_ENDS[0])


@pytest.mark.parametrize("seed", range(3))
async def test_answers_at_random_are_whole(tokenizer: Tokenizer, seed: int) -> None:
    """Of reasoning, little is written: each of its tokens ends it, where it may end."""
    constraint, rng = await compiled(tokenizer, asked(PLACE, must_call=True)), Random(seed)
    end = tokenizer.fast.token_to_id("<|end|>")
    tokens = list[int]()
    while not tokens or tokens[-1] not in tokenizer.answer_end_ids:
        allowed = allowed_ids(constraint)
        assert allowed
        tokens.append(end if end in allowed else rng.choice(allowed))
        constraint.accept(tokens[-1])
    arguments = json.loads(text_of(tokenizer, tokens[:-1]).rpartition("<|message|>")[2])
    assert arguments["city"] in ("Oslo", "Rome")


# --- budgets of reasoning --------------------------------------------------------------------


def told(constraint: TokenConstraint, tokenizer: Tokenizer, text: str, more: int) -> str:
    """Return the next tokens that the grammar allows: "*" for all, [abc] for a choice."""
    assert follows(constraint, tokenizer.fast.encode(text, add_special_tokens=False).ids), text
    found = ""
    for _ in range(more):
        allowed = allowed_ids(constraint)
        if allowed is None or len(allowed) > 2:
            return f"{found}*"
        names = sorted(str(tokenizer.fast.id_to_token(each)) for each in allowed)
        found += names[0] if len(names) == 1 else f"[{''.join(names)}]"
        constraint.accept(allowed[-1])
    return found


BEGINS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("spec", "text", "follows_it"),
    [
        (asked(thinking_budget=3), f"{BEGINS}Hm.", f"{NEXT}<|channel|>final*"),
        (asked(thinking_budget=3), f"{BEGINS}Hm", "*"),
        (asked(thinking_budget=0), BEGINS, f"{NEXT}<|channel|>final*"),
        (asked(thinking_budget=0), FINAL, "*"),
        (asked(NOW, thinking_budget=3), f"{BEGINS}Hm.", f"{NEXT}<|channel|>[cf]inal*"),
        (asked(NOW, thinking_budget=0), CALL.replace("place", "now")[:-1], "*"),
        (asked(thinking_budget=3), f"{BEGINS}H{NEXT}{BEGINS}m", f"{NEXT}<|channel|>final*"),
        (asked(thinking_budget=1, start=Channel.REASONING), "H", f"{NEXT}<|channel|>final*"),
        (
            asked(NOW, thinking_budget=3, must_call=True),
            f"{BEGINS}Hm.",
            f"{NEXT}<|channel|>commentaryĠto=functions.now",
        ),
        (
            asked(NOW, thinking_budget=3, output=YES_OR_NO),
            f"{BEGINS}Hm.",
            f'{NEXT}<|channel|>[cf]inal<|message|>"[ny]',
        ),
    ],
)
async def test_reasoning_ends_with_its_budget_and_another_channel_follows(
    tokenizer: Tokenizer, spec: ConstraintSpec, text: str, follows_it: str
) -> None:
    constraint = await compiled(tokenizer, spec)
    for _ in range(2):
        told_now = told(deepcopy(constraint), tokenizer, text, 40)
        assert told_now[: len(follows_it)] == follows_it
