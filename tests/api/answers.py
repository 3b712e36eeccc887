"""Rows: what the model says, and what its client reads."""

import json
from typing import Any

from server.text.conversation import Tool, Turn
from tests.api.conftest import MAX_LEN
from tests.api.table import Behaviour
from tests.api.wire import (
    ALL,
    CHAT,
    COMPLETIONS,
    FOUR,
    GENERATE,
    HELLO,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    Ask,
)
from tests.server.harness import END

HALF = "\N{REPLACEMENT CHARACTER}"
THINKING = (*FOUR, GENERATE)
WITH_CHOICE = (*OPENAIS, MESSAGES)
# Of the prompt that Ask() makes: one a byte, and one for each tag.
PROMPT_TOKENS = len("|user\nHello|\n|assistant\n")
PLACE = {
    "type": "object",
    "properties": {"at": {"enum": ["a", "b"]}, "times": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LOOK = Tool("look", parameters=PLACE)
WAIT = Tool("wait", parameters=NOTHING)
BOTH = (LOOK, WAIT)
CUT = '<tool_call>\n{"name": "look", "arguments": {"at": "a'
SILENT = "<think>\n\n</think>\n\n"


def think(thoughts: str, text: str = "") -> str:
    return f"<think>\n{thoughts}\n</think>\n\n{text}"


def call(name: str, **arguments: Any) -> str:
    """As the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


TEXTS = (
    Behaviour("an answer is what the model says", says="Grüße 😀!", tokens=14, apis=ALL),
    Behaviour("an answer of nothing has no text", says="", tokens=1, but={
        RESPONSES: {"parts": ["message"]},
        MESSAGES: {"parts": []},
    }, apis=ALL),
    Behaviour(
        "the end of the turn ends the answer and is no part of it",
        says=f"Hello.{END}more",
        text="Hello.",
        tokens=7,
        apis=ALL,
    ),
    Behaviour(
        "an answer has at most as many tokens as are wanted",
        says="a long answer",
        ask=Ask(length=7),
        text="a long ",
        finish="length",
        tokens=7,
        parts=None,
        but={RESPONSES: {"parts": ["message, incomplete"]}},
        apis=ALL,
    ),
    Behaviour(
        "an answer without a limit ends with the context",
        says="x" * MAX_LEN,
        ask=Ask(length=None),
        text="x" * (MAX_LEN - PROMPT_TOKENS),
        finish="length",
        but={
            COMPLETIONS: {"text": "x" * 16, "tokens": 16},
            MESSAGES: {
                "ask": Ask(length=32_000),
                "finish": "model_context_window_exceeded",
            },
        },
        apis=ALL,
    ),
    *(
        Behaviour(
            f"a limit of {length} is none",
            ask=Ask(length=length),
            heard={"max_tokens": MAX_LEN - PROMPT_TOKENS},
            apis=apis,
            but={COMPLETIONS: {"heard": {"max_tokens": MAX_LEN - len("Hello")}}},
        )
        for length, apis in (
            (-1, (*OPENAIS, OLLAMA, COMPLETIONS)),
            (2**31 - 1, (*OPENAIS, OLLAMA)),
            (0, (OLLAMA, GENERATE)),
            (-2, (OLLAMA,)),
        )
    ),
    Behaviour(
        "the newer name of the answer's length wins",
        says="abcdefgh",
        ask=Ask(length=None),
        text="abc",
        finish="length",
        apis=OPENAIS,
        but={
            CHAT: {"fields": {"max_tokens": 7, "max_completion_tokens": 3}},
            RESPONSES: {"fields": {"max_tokens": 7, "max_output_tokens": 3}},
        },
    ),
    Behaviour(
        "the older name of the answer's length is known",
        says="abcdefgh",
        ask=Ask(length=None),
        fields={"max_tokens": 3},
        text="abc",
        finish="length",
        apis=OPENAIS,
        but={CHAT: {"fields": {"max_completion_tokens": 3}}},
    ),
    Behaviour(
        "half a character at the end becomes a sign for one",
        says="a😀",
        ask=Ask(length=3),
        text="a" + HALF,
        finish="length",
        apis=ALL,
    ),
    Behaviour("any name of the model will do", fields={"model": "org/alias"}, apis=ALL),
    Behaviour("a name may have the tag latest", fields={"model": "recall:latest"}, apis=(OLLAMA,)),
    Behaviour(
        "thoughts are not taken out of a text that is gone on with",
        says="<think>Hm.</think>Yes.",
        thought_tokens=0,
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "a raw prompt is gone on with",
        says="<think>in a time.",
        ask=Ask((Turn("user", f"Once{END}"),), stop=("time",)),
        fields={"raw": True},
        text="<think>in a ",
        prompt=f"Once{END}",
        apis=(GENERATE,),
    ),
)  # fmt: skip

STOPS = (
    *(
        Behaviour(
            f"of {says!r} nothing is sent from {' or '.join(stop)} on",
            says=says,
            ask=Ask(stop=stop),
            text=text,
            stopped_by=stopped_by,
            apis=ALL,
        )
        for says, stop, text, stopped_by in (
            ("one STOP two", ("STOP",), "one ", "STOP"),
            ("one STOP two", ("two", "STOP"), "one ", "STOP"),
            ("one STO two", ("STOP",), "one STO two", ""),
            ("STOP", ("STOP",), "", "STOP"),
            ("ends with STO", ("STOP",), "ends with STO", ""),
            ("a€b", ("€",), "a", "€"),
            ("one STOP", ("P",), "one STO", "P"),
            ("a😀", (HALF,), "a😀", ""),
        )
    ),
    Behaviour(
        "what may begin a stop string is sent when the answer is cut off",
        says="a STOP",
        ask=Ask(stop=("STOP",), length=5),
        text="a STO",
        finish="length",
        apis=ALL,
    ),
    Behaviour(
        "the sign for half a character may be a stop string",
        says="a😀",
        ask=Ask(stop=(HALF,), length=3),
        text="a",
        stopped_by=HALF,
        apis=ALL,
    ),
    Behaviour(
        "a stop string ends the work as well",
        says="one STOP" + "x" * 50,
        ask=Ask(stop=("STOP",)),
        text="one ",
        tokens=len("one STOP"),
        stopped_by="STOP",
        apis=ALL,
    ),
    Behaviour(
        "a stop string counts in what is said, and not in thoughts",
        says="<think>a STOP b</think>c STOP d",
        ask=Ask(stop=("STOP",)),
        thoughts="a STOP b",
        text="c ",
        stopped_by="STOP",
        apis=THINKING,
    ),
    Behaviour(
        "one stop string needs no list",
        says="one STOP two",
        fields={"stop": "STOP"},
        text="one ",
        apis=(*OPENAIS, COMPLETIONS, OLLAMA),
        but={OLLAMA: {"fields": {"options": {"stop": "STOP"}}}},
    ),
    Behaviour(
        "an agent may have many stop strings",
        ask=Ask(stop=("es.", *(f"<|{number}|>" for number in range(500)))),
        text="Y",
        stopped_by="es.",
        apis=(MESSAGES, OLLAMA, GENERATE),
    ),
    Behaviour(
        "other tokens may end an answer and are no part of it",
        says="abcd",
        fields={"stop_token_ids": [ord("c") - ord("!")]},
        text="ab",
        tokens=3,
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "the model's own end may be ignored",
        says=f"a{END}b{END}c",
        ask=Ask(length=5),
        fields={"ignore_eos": True},
        text="abc",
        finish="length",
        tokens=5,
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "an answer has at least as many tokens as are wanted",
        says=f"a{END}{END}{END}b",
        fields={"min_tokens": 4},
        tokens=6,
        text="a!!!b",
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "a bias moves the answer",
        says=None,
        ask=Ask(length=3),
        fields={"logit_bias": {str(ord("Z") - ord("!")): 100}},
        text="ZZZ",
        finish="length",
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
)

THOUGHTS = (
    Behaviour(
        "thoughts are kept apart from the answer",
        says=think("Hm.", "Yes."),
        thoughts="Hm.",
        text="Yes.",
        thought_tokens=len("\nHm.\n") + 1,
        apis=THINKING,
        but={
            RESPONSES: {"parts": ["reasoning", "message"]},
            MESSAGES: {"parts": ["thinking", "text"]},
        },
    ),
    Behaviour(
        "a thought that is cut off is no answer",
        says="<think>Let me see",
        ask=Ask(length=8),
        thoughts="Let me",
        text="",
        finish="length",
        apis=THINKING,
        but={RESPONSES: {"parts": ["reasoning, incomplete"]}, MESSAGES: {"parts": ["thinking"]}},
    ),
    Behaviour(
        "thoughts may be all",
        says="<think>\nHm.",
        thoughts="Hm.",
        text="",
        apis=THINKING,
    ),
    Behaviour(
        "thoughts end with their budget",
        says="<think>abcdefgh</think>Yes.",
        ask=Ask(thinks=3, length=6),
        thoughts="abc",
        text="e",
        finish="length",
        held=True,
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "a budget has a second name",
        says="<think>abcdefgh</think>Yes.",
        ask=Ask(length=6),
        fields={"thinking_budget": 3},
        thoughts="abc",
        text="e",
        finish="length",
        held=True,
        apis=OPENAIS,
    ),
    Behaviour(
        "thoughts can be packed for who sends them back",
        says=think("Hm.", "Yes."),
        fields={"include": ["reasoning.encrypted_content"]},
        thoughts="Hm.",
        text="Yes.",
        apis=(RESPONSES,),
    ),
)

CALLS = (
    Behaviour(
        "calls are read out of what the model says",
        says=f"Let me see.\n{call('look', at='Grüße', n=1.5)}\n{call('wait')}",
        ask=Ask(tools=BOTH),
        text="Let me see.",
        calls=[("look", {"at": "Grüße", "n": 1.5}), ("wait", {})],
        finish="tool_calls",
        but={
            RESPONSES: {"parts": ["message", "function_call", "function_call"]},
            MESSAGES: {"parts": ["text", "tool_use", "tool_use"]},
        },
    ),
    Behaviour(
        "a call needs no other word",
        says=call("wait"),
        ask=Ask(tools=BOTH),
        text="",
        calls=[("wait", {})],
        finish="tool_calls",
        but={RESPONSES: {"parts": ["function_call"]}, MESSAGES: {"parts": ["tool_use"]}},
    ),
    Behaviour(
        "thoughts come before calls",
        says=think("Hm.", call("wait")),
        ask=Ask(tools=BOTH),
        thoughts="Hm.",
        text="",
        calls=[("wait", {})],
        finish="tool_calls",
    ),
    Behaviour(
        "what is said around a call is text",
        says=f"Sure.{call('wait')}Done.",
        ask=Ask(tools=BOTH),
        text="Sure.Done.",
        calls=[("wait", {})],
        finish="tool_calls",
        but={
            RESPONSES: {"parts": ["message", "function_call", "message"]},
            MESSAGES: {"parts": ["text", "tool_use", "text"]},
        },
    ),
    *(
        Behaviour(
            f"{says!r} is no call, but text",
            says=says,
            ask=Ask(tools=BOTH),
        )
        for says in (
            "<tool_call>\nno",
            '<tool_call>\n{"name": "wait", "arguments": [1]}\n</tool_call>',
            '<tool_call>\n{"name": "wait"',
        )
    ),
    Behaviour(
        "the last of several calls may have no end",
        says=f'{call("wait")}\n<tool_call>\n{{"name": "look", "arguments": {{"at": "a',
        ask=Ask(tools=BOTH),
        text="",
        calls=[("wait", {}), ("look", {"at": "a"})],
        finish="stop",
        but={
            RESPONSES: {
                "finish": "tool_calls",
                "parts": ["function_call", "function_call, incomplete"],
            },
            MESSAGES: {"parts": ["tool_use", "tool_use"]},
            OLLAMA: {"finish": "tool_calls"},
        },
    ),
    *(
        Behaviour(
            f"a call that is cut off after {before!r} is told as far as it came",
            says=before + CUT + 'aaa"}}',
            ask=Ask(tools=BOTH, length=len(before + CUT)),
            text=before.rstrip("\n"),
            calls=[("look", '{"at": "a')],
            finish="length",
            but={
                api: {
                    "text": before + CUT,
                    "calls": [],
                }
                for api in (MESSAGES, OLLAMA)
            },
        )
        for before in ("", "Well.\n")
    ),
    *(
        Behaviour(
            f"brackets that the model forgets before {end!r} are closed where the call is",
            says=f'<tool_call>\n{{"name": "look", "arguments": {{"at": ["a"{end}',
            ask=Ask(tools=BOTH),
            text="",
            calls=[("look", {"at": ["a"]})],
            finish="tool_calls" if end else "stop",
            but={
                MESSAGES: {"finish": "tool_calls" if end else "stop"},
                OLLAMA: {"finish": "tool_calls"},
            },
        )
        for end in ("", "</tool_call>")
    ),
    Behaviour(
        "a call with half a character is text for who wants objects",
        says='<tool_call>\n{"name": "look", "arguments": {"at": "\\ud800"}}\n</tool_call>',
        ask=Ask(tools=BOTH),
        text="",
        calls=[("look", {"at": "\ud800"})],
        finish="tool_calls",
        but={
            api: {
                "text": '<tool_call>\n{"name": "look", "arguments": {"at": "\\ud800"}',
                "calls": [],
                "finish": "stop",
            }
            for api in (MESSAGES, OLLAMA)
        },
    ),
    Behaviour("nobody calls without tools", says=call("wait")),
    Behaviour(
        "nobody calls where it is forbidden",
        says=call("wait"),
        ask=Ask(tools=BOTH, choice="none"),
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "an answer without parallel calls ends with its first",
        says=call("wait") * 3,
        ask=Ask(tools=BOTH, one_call=True),
        text="",
        calls=[("wait", {})],
        finish="tool_calls",
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "a stop string before a call ends the answer",
        says=f"Sure.\n{call('look', at='a')}",
        ask=Ask(tools=BOTH, stop=("re.",)),
        text="Su",
        stopped_by="re.",
    ),
    *(
        Behaviour(
            f"a call may contain the stop string {stop!r}",
            says=f"Sure.\n{call('look', at='a')}",
            ask=Ask(tools=BOTH, stop=(stop,)),
            text="Sure.",
            calls=[("look", {"at": "a"})],
            finish="tool_calls",
        )
        for stop in ("<tool_call>", "look")
    ),
    *(
        Behaviour(
            f"a call that {choice} asks for satisfies its schema",
            says=None,
            ask=Ask(tools=BOTH, choice=choice, one_call=True, thinks=False),
            text="",
            calls=[("look", {"at": "a", "times": 0})],
            finish="tool_calls",
            held=True,
            apis=WITH_CHOICE,
        )
        for choice in ("look", "required")
    ),
    Behaviour(
        "only what is allowed is called",
        says=f"Well.\n{call('look', at='a')}",
        ask=Ask(tools=BOTH),
        text="Well.",
        calls=[("wait", {"at": "a"})],
        finish="tool_calls",
        apis=OPENAIS,
        but={
            CHAT: {
                "fields": {
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {
                            "mode": "auto",
                            "tools": [{"type": "function", "function": {"name": "wait"}}],
                        },
                    }
                }
            },
            RESPONSES: {
                "fields": {
                    "tool_choice": {
                        "type": "allowed_tools",
                        "tools": [{"type": "function", "name": "wait"}],
                    }
                }
            },
        },
    ),
)  # fmt: skip

FORMS = (
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

LOGPROBS = (
    Behaviour(
        "log-probabilities cover every token of the text",
        says="né!",
        ask=Ask(logprobs=2),
        logprobs=["n", HALF, HALF, "!"],
        apis=(*OPENAIS, OLLAMA, GENERATE, COMPLETIONS),
        but={COMPLETIONS: {"logprobs": ["n", HALF, HALF, "!", END]}},
    ),
    Behaviour(
        "log-probabilities are told beside the text alone",
        says=think("Hm.", f"Yes.\n{call('wait')}"),
        ask=Ask(logprobs=0, tools=BOTH),
        thoughts="Hm.",
        text="Yes.",
        calls=[("wait", {})],
        finish="tool_calls",
        logprobs=["\n", "\n", *"Yes."],
        apis=(RESPONSES,),
    ),
)

CONTINUED = (
    Behaviour(
        "an answer that is begun is gone on with",
        says=" upon a time",
        ask=Ask((HELLO, Turn("assistant", "Once")), goes_on=True),
        prompt=f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\n{SILENT}Once",
    ),
    Behaviour(
        "thoughts that are begun are gone on with",
        says=" so</think>\n\nDone",
        ask=Ask((HELLO, Turn("assistant", "", "Hm,")), goes_on=True),
        thoughts=" so",
        text="Done",
        prompt=f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\n<think>\nHm,",
    ),
    Behaviour(
        "text after thoughts that are sent is text",
        says=" <think> </think>",
        ask=Ask((HELLO, Turn("assistant", "A tag is", "Hm.")), goes_on=True),
    ),
    Behaviour(
        "stop strings are looked for in what is new",
        says="b, then ab",
        ask=Ask((HELLO, Turn("assistant", "a")), goes_on=True, stop=("ab",)),
        text="b, then ",
        stopped_by="ab",
    ),
    Behaviour(
        "a call follows the text that is begun",
        says=f" see.\n{call('wait')}",
        ask=Ask((HELLO, Turn("assistant", "Let me")), goes_on=True, tools=BOTH),
        text=" see.",
        calls=[("wait", {})],
        finish="tool_calls",
    ),
    Behaviour(
        "an answer of a form is continued within it",
        says="5, no",
        ask=Ask(
            (HELLO, Turn("assistant", '{"a": ')),
            goes_on=True,
            form={"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"],
                  "additionalProperties": False},
        ),
        text=("5}", "5\n}", "5 }"),
        held=True,
    ),
    Behaviour(
        "a form holds after thoughts that are begun",
        says="so</think>",
        ask=Ask(
            (HELLO, Turn("assistant", "", "Hm, ")), goes_on=True, form={"enum": ["yes"]}
        ),
        thoughts="so",
        text='"yes"',
    ),
    Behaviour(
        "a budget counts the thoughts that are new",
        says="abcdef",
        ask=Ask((HELLO, Turn("assistant", "", "Hm, hm")), goes_on=True, thinks=2, length=3),
        thoughts="ab",
        text="",
        finish="length",
        apis=OPENAIS,
    ),
    *(
        Behaviour(
            f"a message may say by {message} and {fields} that it is continued",
            says=" upon",
            ask=Ask((HELLO, Turn("assistant", "Once"))),
            prompt=f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\n{SILENT}Once",
            apis=OPENAIS,
            but={
                api: {
                    "fields": fields
                    | {
                        name: [
                            {"role": "user", "content": "Hello"},
                            {"role": "assistant", "content": "Once"} | message,
                        ]
                    }
                }
                for api, name in ((CHAT, "messages"), (RESPONSES, "input"))
            },
        )
        for message, fields in (
            ({"prefix": True}, {}),
            ({"prefix": True}, {"add_generation_prompt": False}),
            ({}, {"continue_final_message": True, "add_generation_prompt": False}),
        )
    ),
    Behaviour(
        "an unmarked turn of the assistant is followed by another",
        ask=Ask((HELLO, Turn("assistant", "Once"))),
        fields={"continue_final_message": False},
        prompt=(
            f"<|im_start|>user\nHello{END}\n<|im_start|>assistant\nOnce{END}\n"
            "<|im_start|>assistant\n"
        ),
        apis=OPENAIS,
    ),
)  # fmt: skip

ANSWERS = (*TEXTS, *STOPS, *THOUGHTS, *CALLS, *FORMS, *LOGPROBS, *CONTINUED)
