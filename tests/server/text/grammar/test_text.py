"""What the grammars of outputs and calls take, and what they refuse."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from server.text.calls.tool_format import ToolFormat
from server.text.conversation import OutputFormat, Tool
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.schemas import MAX_PATTERNS
from server.text.grammar.text import MAX_CALLS, MAX_RULES, TokenizerFacts, grammar_text
from server.text.tokenizer import Tokenizer
from tests.server.harness import token_id
from tests.server.text.grammars import (
    compiled,
    follows,
    of_schema,
    refusal,
    stop_ids,
    tagged_tokenizer,
    takes,
    text_of,
    wander,
)

PLACE = Tool("place", parameters={
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
})  # fmt: skip
NO_TAGS = TokenizerFacts(0, [], {}, {})
NOW = Tool("now", parameters={"type": "object", "additionalProperties": False})
CALL = '<tool_call>\n{"name": "place", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=place>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
LLAMA_CALL = '{"name": "place", "parameters": {"city": "Oslo", "days": 3}}'
CALLS = {ToolFormat.HERMES: CALL, ToolFormat.XML: XML_CALL, ToolFormat.LLAMA: LLAMA_CALL}


def output(kind: Any, value: Any = None) -> ConstraintSpec:
    return ConstraintSpec(OutputFormat(kind, value))


def calls(*tools: Tool, **changes: Any) -> ConstraintSpec:
    return replace(ConstraintSpec(tools=tools, must_call=True), **changes)


# --- outputs -----------------------------------------------------------------------------------


async def test_a_known_key_cannot_come_again_in_disguise(tokenizer: Tokenizer) -> None:
    constraint = await of_schema(
        tokenizer, {"properties": {"a": {"type": "integer"}}, "type": "object"}
    )
    assert takes(constraint, tokenizer, '{"a": 1, "b": "x"}')
    assert not takes(constraint, tokenizer, '{"a": 1, "a": "x"}')
    assert not takes(constraint, tokenizer, '{"a": 1, "\\u0061": "x"}')


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [("[a-z]+/\\d{2}", "ab/12", "ab/1"), ("^yes|no$", "no", "maybe"), ('"\\\\?"', '"\\"', "x")],
)
async def test_a_pattern_is_of_the_whole_answer(
    tokenizer: Tokenizer, pattern: str, text: str, other: str
) -> None:
    constraint = await compiled(tokenizer, output("regex", pattern))
    assert takes(constraint, tokenizer, text)
    assert not takes(constraint, tokenizer, other)
    assert not takes(constraint, tokenizer, text + "!")


async def test_a_choice_is_taken_letter_by_letter(tokenizer: Tokenizer) -> None:
    wanted = ["yes", "yes, but", 'a"\\b\n', "日本😀", "\x7f\x01", "|"]
    constraint = await compiled(tokenizer, output("choice", wanted))
    assert all(takes(constraint, tokenizer, text) for text in wanted)
    assert not any(takes(constraint, tokenizer, text) for text in ("", "yes,", "no", "yes |"))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: greeting NAME\ngreeting: "hi " | "bye "\nNAME: /[a-z]+/',
        'root ::= greeting name\ngreeting ::= "hi " | "bye "\nname ::= [a-z]+',
    ],
)
async def test_a_grammar_is_lark_or_gbnf(tokenizer: Tokenizer, grammar: str) -> None:
    constraint = await compiled(tokenizer, output("grammar", grammar))
    assert takes(constraint, tokenizer, "hi ann")
    assert takes(constraint, tokenizer, "bye bob")
    assert not takes(constraint, tokenizer, "hi ")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (output("json_schema", {"not": {"a": 1}}), "not at # is not supported"),
        (output("json_schema", {"$ref": "#"}), "no answer"),
        (output("json_schema", {"allOf": [{"type": "null"}, {"type": "object"}]}), "no answer"),
        (output("json_schema", 3), "must be an object"),
        (output("regex", ""), "it must be a text"),
        (output("regex", "a\ud800"), "halves of characters"),
        (output("regex", None), "it must be a text"),
        (output("choice", []), "no choices"),
        (output("choice", "yes"), "no choices"),
        (output("choice", ["a", ""]), "it must be a text"),
        (output("grammar", "hello"), "neither Lark nor GBNF"),
        (output("grammar", "root ::= ("), "neither Lark nor GBNF"),
        (output("grammar", "root ::= " + "(" * 800 + '"a"' + ")" * 800), "nested too deeply"),
        (output("grammar", "start: " + "(" * 800 + '"a"' + ")" * 800), "nested"),
        (output("grammar", 'start: a\na[temperature=0.5]: "x"'), "temperature in a grammar"),
        (output("grammar", 'start: a\na[lazy, stop="x"]: /y+/'), "stop in a grammar"),
        (
            output("grammar", 'start: "a"\n' + 'x: "b"\n' * MAX_RULES),
            f"more than {MAX_RULES} rules",
        ),
        (output("grammar", "start: missing"), "not valid"),
        (output("grammar", 'start: "a"{9000}'), "a repeat of more than 8192"),
        (output("regex", "a{60000}"), "a repeat of more than 8192"),
        (output("regex", "a{1,0000060000}"), "a repeat of more than 8192"),
        (output("json_schema", {"pattern": "a{60000,}"}), "a repeat of more than 8192"),
        (output("json_schema", {"patternProperties": {"a{9999}": {}}}), "a repeat of more than"),
        (output("json_schema", {"properties": {f"p{n}": {} for n in range(500)}}), "too many ways"),
        (output("choice", [f"c{n}" for n in range(5000)]), "too many ways"),
        (
            output("grammar", "start: T\nT: /a/" + " & /a.*/" * (MAX_PATTERNS + 1)),
            f"& comes more than {MAX_PATTERNS} times",
        ),
        (
            output("json_schema", {"allOf": [{"pattern": f"a{{{n}}}.*b"} for n in range(300)]}),
            f"pattern is supported up to {MAX_PATTERNS} times",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused_with_its_field(
    tokenizer: Tokenizer, spec: ConstraintSpec, says: str
) -> None:
    error = await refusal(tokenizer, spec)
    assert says in str(error)
    assert error.param == "response_format"


# What would take the square of its length, each by its length.
LONG_GRAMMARS = {
    "open brackets": lambda n: "[" * n,
    "brackets and an attribute": lambda n: "[" * n + "a",
    "a quote that never closes": lambda n: '"' + '\\"' * n,
    "a slash that never closes": lambda n: "/" + "\\/" * n,
    "blank lines": lambda n: 'root ::= "a"' + "\n" * n,
    "lines of spaces": lambda n: 'root ::= "a"' + "\n " * n,
    "repeats that never close": lambda n: "{1" * n,
    "names that never close": lambda n: "<a" * n,
}


@pytest.mark.parametrize("make", LONG_GRAMMARS.values(), ids=LONG_GRAMMARS)
def test_reading_a_grammar_takes_no_longer_than_it_is_long(make: Callable[[int], str]) -> None:
    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            with suppress(GrammarError):
                grammar_text(output("grammar", make(length)), NO_TAGS)
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(32_000) < 8 * seconds(8_000) + 0.01


@pytest.mark.parametrize("name", ["<think>", "</think>", "<|im_start|>", "<|im_end|>"])
async def test_a_text_that_spells_an_added_token_can_be_said(
    tokenizer: Tokenizer, name: str
) -> None:
    noted = {"note": f"{name} and {name}"}
    call = json.dumps({"name": "a", "arguments": {"note": name}})
    tool = Tool("a", parameters={"properties": {"note": {"const": name}}, "required": ["note"]})
    for spec, said in (
        (output("json_schema", {"const": noted}), json.dumps(noted)),
        (output("choice", [f"a{name}b", f"a{name}c"]), f"a{name}c"),
        (output("regex", re.escape(name)), name),
        (output("grammar", f"start: {json.dumps(name)}"), name),
        (output("json_schema", {"required": [name]}), json.dumps({name: 1})),
        (calls(tool), f"<tool_call>\n{call}\n</tool_call>"),
    ):
        constraint = await compiled(tokenizer, spec)
        spelt = [token for letter in said for token in tokenizer.fast.encode(letter).ids]
        assert follows(constraint, [*spelt, min(stop_ids(tokenizer))]), spec


async def test_a_grammar_may_name_an_added_token(tokenizer: Tokenizer) -> None:
    constraint = await compiled(tokenizer, output("grammar", 'start: <think> "<think>" "a"'))
    token = token_id(tokenizer, "<think>")
    spelt = [i for letter in "<think>a" for i in tokenizer.fast.encode(letter).ids]
    assert follows(constraint, [token, *spelt])
    constraint = await compiled(tokenizer, output("grammar", 'start: <think> "a"'))
    assert not follows(constraint, spelt)


# --- calls -------------------------------------------------------------------------------------


async def test_calls_that_must_be_made_satisfy_their_tools_schemas(tokenizer: Tokenizer) -> None:
    constraint = await compiled(tokenizer, calls(PLACE, NOW))
    for text in (CALL, NOW_CALL, f"{CALL}\n{NOW_CALL}"):
        assert takes(constraint, tokenizer, text)
    for text in (
        "",
        "text",
        f"text {CALL}",
        f"{CALL} text",
        f"{CALL}{NOW_CALL}",
        CALL.replace("3", '"3"'),
        CALL.replace('"city": "Oslo", ', ""),
        CALL.replace("place", "other"),
        NOW_CALL.replace("{}", '{"a": 1}'),
    ):
        assert not takes(constraint, tokenizer, text)


async def test_there_is_an_end_to_calls(tokenizer: Tokenizer) -> None:
    constraint = await compiled(tokenizer, calls(NOW))
    assert takes(constraint, tokenizer, "\n".join([NOW_CALL] * MAX_CALLS))
    assert not takes(constraint, tokenizer, "\n".join([NOW_CALL] * (MAX_CALLS + 1)))


async def test_calls_in_xml_satisfy_them_too(tokenizer: Tokenizer) -> None:
    constraint = await compiled(tokenizer, calls(PLACE, NOW, tool_format=ToolFormat.XML))
    now = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for text in (
        XML_CALL,
        now,
        f"{XML_CALL}\n{now}",
        XML_CALL.replace("Oslo", "\nO<b>\n"),
        XML_CALL.replace("<parameter=days>\n3\n</parameter>\n", ""),
    ):
        assert takes(constraint, tokenizer, text)
    for text in (
        CALL,
        XML_CALL.replace("Oslo", "0123456789"),
        XML_CALL.replace("3", "three"),
        XML_CALL.replace("3", '"3"'),
        XML_CALL.replace("place", "now"),
        XML_CALL.replace("<parameter=city>\nOslo\n</parameter>\n", ""),
        XML_CALL.replace("Oslo", "Os</parameter>lo"),
    ):
        assert not takes(constraint, tokenizer, text)


@pytest.mark.parametrize("form", CALLS)
async def test_a_tool_without_a_schema_takes_any_object(
    tokenizer: Tokenizer, form: ToolFormat
) -> None:
    constraint = await compiled(tokenizer, calls(Tool("place"), tool_format=form))
    call = CALLS[form]
    for value in ("3", "true", "null", "-2.5", '{"x": 1}', "[]"):
        assert takes(constraint, tokenizer, call.replace("3", value))


STRING_OF_3 = {"type": "string", "maxLength": 3}
DEFINITIONS = {
    "text": STRING_OF_3,
    "a/b": {"$ref": "#/$defs/text"},
    "null": {"type": "null"},
    "nothing": {"$ref": "#/$defs/null"},
}
STRINGS_OR_NULL = (
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [STRING_OF_3, {"type": "null"}]},
    {"oneOf": [{"type": "null"}, False, {"$ref": "#/$defs/text"}], "type": ["string", "null"]},
    {"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/nothing"}]},
)


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"type": ["string", "null"]}, ["a", "", "null", "nul", "3", "{"], ["None"]),
        ({"anyOf": [{"type": "integer"}, {"maxLength": 2, "type": "string"}]}, ["12345", "-a"],
         ["1.5", "1e5", "abc", "007"]),
        ({"enum": ["a", "2", 3, None]}, ["a", "3", "null"], ["2", "4", "b"]),
        ({"type": ["string", "array"]}, ['["a"]', "a]", "1"], ["[", "[a]"]),
        ({"type": "string", "enum": ["x\ny", ""]}, ["x\ny", ""], ["x", "y"]),
        ({"$ref": "#/$defs/a~1b"}, ["abc", ""], ["abcd"]),
        ({"$ref": "#/$defs/a~1b", "minLength": 2}, ["ab"], ["a", "abcd"]),
        ({"allOf": [STRING_OF_3, {"type": "string"}, True]}, ["abc"], ["abcd"]),
        ({"const": 'a"'}, ['a"'], ["b"]),
        ({"type": "string", "pattern": "b+"}, ["abc"], ["ac"]),
        ({"type": "string", "pattern": "^b+$"}, ["bb"], ["abb", "bba"]),
        ({"type": "string", "pattern": "^[$^]\\$"}, ["$$x"], ["x$$"]),
        ({"type": "string", "pattern": "\\d/(a|b)$"}, ["x1/a"], ["1/ax"]),
        ({"type": "string", "format": "date"}, ["soon"], []),
        ({"type": "number"}, ["1.5", "-2"], ["1e999", "x"]),
        ({"type": "number", "maximum": 3}, ["3"], ["4"]),
        ({"const": 1.5}, ["1.5"], ["1", '"1.5"']),
        *((schema, ["abc", "", "null"], ["abcd", "None"]) for schema in STRINGS_OR_NULL),
    ],
)  # fmt: skip
async def test_a_value_is_what_its_reader_takes_it_for_and_of_its_schema(
    tokenizer: Tokenizer, schema: Any, texts: list[str], others: list[str]
) -> None:
    properties = {"city": schema, "days": {}}
    parameters = {"type": "object", "properties": properties, "$defs": DEFINITIONS}
    spec = calls(Tool("place", parameters=parameters), tool_format=ToolFormat.XML)
    constraint = await compiled(tokenizer, spec)
    for text in texts:
        assert takes(constraint, tokenizer, XML_CALL.replace("Oslo", text)), text
    for text in others:
        assert not takes(constraint, tokenizer, XML_CALL.replace("Oslo", text)), text


async def test_parameters_are_an_object_whatever_their_schema_leaves_out(
    tokenizer: Tokenizer,
) -> None:
    constraint = await compiled(tokenizer, calls(Tool("now", parameters={"maxProperties": 0})))
    assert takes(constraint, tokenizer, NOW_CALL)
    assert not takes(constraint, tokenizer, NOW_CALL.replace("{}", "[]"))


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("special", [True, False])
async def test_tags_that_are_tokens_are_written_as_such(
    tmp_path: Path, form: ToolFormat, special: bool
) -> None:
    caller = tagged_tokenizer(tmp_path, special=special)
    text = CALLS[form]
    constraint = await compiled(caller, calls(PLACE, tool_format=form))
    assert takes(constraint, caller, text)
    assert not takes(constraint, caller, text + "\n" + text + "x")
    assert takes(constraint, caller, f"{text}\n{text}") is (form is not ToolFormat.LLAMA)


async def test_a_form_and_tools_that_may_be_called_leave_the_model_the_choice(
    tokenizer: Tokenizer,
) -> None:
    spec = ConstraintSpec(OutputFormat("json_schema", {"type": "integer"}), (PLACE, NOW))
    constraint = await compiled(tokenizer, spec)
    for text in ("12", CALL, f"{NOW_CALL}\n{NOW_CALL}", CALL.replace("3", '"three"')):
        assert takes(constraint, tokenizer, text), "PLACE is not strict"
    for text in ("twelve", f"12{CALL}", CALL.replace("place", "other")):
        assert not takes(constraint, tokenizer, text)


async def test_a_strict_tool_that_may_be_called_is_held_to_its_schema(
    tokenizer: Tokenizer,
) -> None:
    strict = Tool("place", parameters=PLACE.parameters, strict=True)
    constraint = await compiled(tokenizer, ConstraintSpec(tools=(strict, NOW)))
    for text in ("text", f"text\n{CALL}", f"{CALL}\n{NOW_CALL}", NOW_CALL.replace("{}", '{"a":1}')):
        assert takes(constraint, tokenizer, text)
    assert not takes(constraint, tokenizer, CALL.replace("3", '"three"'))


async def test_a_strict_tool_that_llama_may_call_is_held_to_its_schema(
    tokenizer: Tokenizer,
) -> None:
    strict = Tool("place", parameters=PLACE.parameters, strict=True)
    spec = ConstraintSpec(tools=(strict, NOW), tool_format=ToolFormat.LLAMA)
    constraint = await compiled(tokenizer, spec)
    for text in ("text", "\nSo: {", "<b>", LLAMA_CALL):
        assert takes(constraint, tokenizer, text)
    for text in (LLAMA_CALL.replace("3", '"three"'), "{}", " {", f"<|python_tag|>{LLAMA_CALL}x"):
        assert not takes(constraint, tokenizer, text)


async def test_the_tools_field_is_named_for_faults_of_tools(tokenizer: Tokenizer) -> None:
    faults: list[Any] = [{"not": {}}, {"type": "string", "pattern": "("}, {"$ref": "#/x"}]
    for parameters in faults:
        schema = {"type": "object", "properties": {"a": parameters}, "required": ["a"]}
        error = await refusal(tokenizer, calls(NOW, Tool("now", None, schema, strict=True)))
        assert error.param == "tools"
    spec = ConstraintSpec(
        OutputFormat("json_object"), (Tool("now", None, {"not": {}}, strict=True),)
    )
    assert (await refusal(tokenizer, spec)).param == "tools"


async def test_names_of_tools_may_be_anything_that_json_can_write(tokenizer: Tokenizer) -> None:
    constraint = await compiled(tokenizer, calls(Tool('a"\\é', parameters=NOW.parameters)))
    assert takes(constraint, tokenizer, NOW_CALL.replace("now", 'a\\"\\\\é'))


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("seed", range(3))
async def test_calls_at_random_are_whole(tokenizer: Tokenizer, form: ToolFormat, seed: int) -> None:
    constraint = await compiled(tokenizer, calls(PLACE, NOW, tool_format=form))
    tokens = wander(constraint, tokenizer, Random(seed))
    assert tokens is not None
    text = text_of(tokenizer, tokens)
    if form is not ToolFormat.LLAMA:
        assert text.startswith("<tool_call>\n")
        assert text.endswith("\n</tool_call>")
    if form is not ToolFormat.XML:
        first = text.split("</tool_call>")[0].removeprefix("<tool_call>")
        assert json.loads(first)["name"] in ("place", "now")


@pytest.mark.parametrize(("written", "value"), [('"&&&"', "&&&"), ("/&{3}|&{9}\\/&/", "&&&")])
async def test_what_a_grammar_says_literally_does_not_count(
    tokenizer: Tokenizer, written: str, value: str
) -> None:
    others = " ".join(['"&"'] * 20)
    constraint = await compiled(tokenizer, output("grammar", f"start: {others} A\nA: {written}"))
    assert takes(constraint, tokenizer, "&" * 20 + value)


# --- white space ----------------------------------------------------------------------------------


DOCUMENT = Path(__file__).parents[4] / "server" / "protocol" / "README.md"
SENTENCE = (
    "Between its parts JSON may have one space or one tab, or a new line and up to 24 spaces and "
    "tabs."
)
SPACES = ("", " ", "\t", "\n", "\r\n", "\n" + 24 * " ", "\n" + 12 * " \t")
WRONG_SPACES = ("  ", "\t\t", " \t", " \n", "\n\n", "\r", "\n" + 25 * " ", "\n" + 25 * "\t", "\f")


def test_the_document_says_which_white_space_json_may_have() -> None:
    assert SENTENCE in " ".join(DOCUMENT.read_text().split())


@pytest.mark.parametrize("place", ['{{{}"a":1}}', '{{"a"{}:1}}', '{{"a":{}1}}', '{{"a":1{}}}'])
async def test_json_has_the_white_space_that_the_document_says(
    tokenizer: Tokenizer, place: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    constraint = await of_schema(tokenizer, schema)
    for space in SPACES:
        assert takes(constraint, tokenizer, place.format(space)), repr(space)
    for space in WRONG_SPACES:
        assert not takes(constraint, tokenizer, place.format(space)), repr(space)
