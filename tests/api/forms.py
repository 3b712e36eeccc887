"""Rows: forms that hold an answer."""

import json

from server.text.conversation import Tool
from tests.api.table import (
    CHAT,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    THINKING,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import Ask
from tests.api.words import NOTHING

ADDED = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BEHAVIOURS = (
    Behaviour(
        "an answer has the form that is asked for",
        says="perhaps",
        ask=Ask(form={"enum": ["yes", "no"]}, thinks=False),
        text=('"yes"', '"no"'),
        held=True,
        apis=THINKING,
    ),
    Behaviour(
        "thoughts come before a form",
        says="<think>Hm.</think>perhaps",
        ask=Ask(form={"enum": ["yes", "no"]}),
        thoughts="Hm.",
        text=('"yes"', '"no"'),
        held=True,
        apis=THINKING,
    ),
    *(
        Behaviour(
            f"an answer of a form may spell {name}",
            says="perhaps",
            ask=Ask(form={"enum": [name]}, thinks=False),
            text=json.dumps(name),
            held=True,
            apis=THINKING,
        )
        for name in ADDED
    ),
    *(
        Behaviour(
            f"a call may spell {name}",
            says=None,
            ask=Ask(
                tools=(
                    Tool("wait", parameters=NOTHING | {"properties": {"at": {"enum": [name]}}}),
                ),
                choice="required",
                one_call=True,
                thinks=False,
            ),
            text=("",),
            calls=[("wait", {"at": name})],
            finish="tool_calls",
            apis=WITH_CHOICE,
        )
        for name in ADDED
    ),
    *(
        Behaviour(
            f"an answer is held to {fields}",
            says="perhaps",
            ask=Ask(thinks=False),
            fields=fields,
            text=texts,
            held=True,
            apis=apis,
        )
        for fields, texts, apis in (
            ({"guided_choice": ["yes", "no"]}, ("yes", "no"), WITH_CHOICE),
            ({"guided_regex": "x{3}"}, ("xxx",), WITH_CHOICE),
            ({"guided_grammar": 'start: "a" "b"'}, ("ab",), WITH_CHOICE),
            ({"guided_json": {"const": 7}}, ("7",), WITH_CHOICE),
            ({"guided_json": '{"const": 7}'}, ("7",), WITH_CHOICE),
            ({"structured_outputs": {"regex": "x{3}"}}, ("xxx",), WITH_CHOICE),
            ({"structured_outputs": {"choice": ["yes"]}}, ("yes",), WITH_CHOICE),
            ({"structured_outputs": {"json": {"const": 7}}}, ("7",), WITH_CHOICE),
            ({"structured_outputs": {"grammar": 'start: "a"'}}, ("a",), WITH_CHOICE),
            (
                {"response_format": {"type": "json_object", "schema": {"const": 7}}},
                ("7",),
                WITH_CHOICE,
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
                ("0", "{}", '""', "[]", "null"),
                (),
            ),
        )
    ),
    *(
        Behaviour(
            f"an answer of any object is held to {fields}",
            says="{}",
            ask=Ask(thinks=False),
            fields=fields,
            held=True,
            apis=apis,
        )
        for fields, apis in (
            ({"response_format": {"type": "json_object"}}, WITH_CHOICE),
            ({"structured_outputs": {"json_object": True}}, WITH_CHOICE),
            ({"text": {"format": {"type": "json_object"}}}, (RESPONSES,)),
            ({"format": "json"}, (OLLAMA, GENERATE)),
            ({"format": {}}, (OLLAMA, GENERATE)),
        )
    ),
    *(
        Behaviour(f"{fields} asks for no form", fields=fields, held=False, apis=apis)
        for fields, apis in (
            ({"response_format": {"type": "text"}}, WITH_CHOICE),
            ({"response_format": None, "structured_outputs": None}, WITH_CHOICE),
            ({"structured_outputs": {"json": None, "json_object": False}}, WITH_CHOICE),
            ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, (RESPONSES,)),
            ({"text": {}}, (RESPONSES,)),
            ({"output_config": {}}, (MESSAGES,)),
            ({"format": ""}, (OLLAMA, GENERATE)),
            ({"format": None}, (OLLAMA, GENERATE)),
        )
    ),
)

REFUSALS = (
    Refusal("a form is one of a few", "response_format", ("text",), apis=(CHAT,)),
    Refusal("a form has a type that there is", bodies=({"response_format": {"type": "xml"}},),
            param="response_format.type", apis=WITH_CHOICE),
    Refusal("a text has a type that there is", bodies=({"text.format": {"type": "xml"}},),
            param="text.format.type", apis=(RESPONSES,)),
    Refusal("a text of a schema has one", bodies=({"text.format": {"type": "json_schema"}},),
            param="text.format.schema", apis=(RESPONSES,)),
    Refusal("an output has a schema", bodies=({"output_config.format": {"type": "text"}},),
            param="output_config.format.type", apis=(MESSAGES,)),
    Refusal("a format is json or a schema", "format", ("yaml",), param="format",
            apis=(OLLAMA, GENERATE)),
    *(
        Refusal(f"{given} asks for no form that there is", bodies=(given,), param=param,
                apis=WITH_CHOICE)
        for given, param in (
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_json": "[1]"}, "guided_json"),
            ({"guided_json": 5}, "guided_json"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_choice": [1]}, "guided_choice[0]"),
            ({"guided_regex": 5}, "guided_regex"),
            ({"guided_regex": "("}, "guided_regex"),
            ({"structured_outputs": "json"}, "structured_outputs"),
            ({"structured_outputs": {"json": "no"}}, "structured_outputs.json"),
            (
                {"structured_outputs": {"structural_tag": {"a": 1}}},
                "structured_outputs.structural_tag",
            ),
        )
    ),
    *(
        Refusal(f"a long text {label} is no schema", bodies=({"guided_json": text},),
                param="guided_json", apis=WITH_CHOICE)
        for label, text in (
            ("of brackets", "[" * 5000), ("of numbers", f'{{"enum": [{"1, " * 40_000}1]}}'),
        )
    ),
    *(
        Refusal(f"{given} says twice what the answer must be", bodies=(given,), param=param,
                message="both say", apis=WITH_CHOICE)
        for given, param in (
            ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
            ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
            ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
        )
    ),
    Refusal("its own form and another are two", bodies=({"guided_regex": "a"},),
            param="guided_regex", message="both say", apis=(RESPONSES, MESSAGES), but={
                RESPONSES: {"bodies": (
                    {"guided_regex": "a", "text.format": {"type": "json_object"}},)},
                MESSAGES: {"bodies": ({
                    "guided_regex": "a",
                    "output_config.format": {"type": "json_schema", "schema": {}},
                },)},
            }),
    Refusal("a form is held to the end, which cannot be ignored", bodies=(
        {"ignore_eos": True, "guided_regex": "a"},), param="ignore_eos", apis=WITH_CHOICE),
    Refusal("a schema that cannot be enforced is refused by its place", bodies=(
        {"guided_json": {"type": "object", "not": {"a": 1}}},), param="guided_json", message="not",
        apis=WITH_CHOICE, but={
            CHAT: {"param": "response_format.json_schema.schema", "bodies": (
                {"response_format": {"type": "json_schema", "json_schema": {
                    "name": "n", "strict": True, "schema": {"type": "object", "not": {"a": 1}},
                }}},)},
            RESPONSES: {"param": "text.format.schema", "bodies": (
                {"text.format": {"type": "json_schema", "strict": True,
                                 "schema": {"$ref": "x"}}},), "message": ""},
            MESSAGES: {"param": "output_config.format.schema", "bodies": (
                {"output_config.format": {"type": "json_schema", "schema": {"not": {}}}},)},
        }),
)  # fmt: skip
