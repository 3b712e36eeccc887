"""Rows: tools, the choice of them, and calls."""

from typing import Any

from tests.api.table import (
    CHAT,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import Api, Ask
from tests.api.words import BOTH, PLACE, WAIT, call, make_function, think
from tests.server.harness import Json

CUT = '<tool_call>\n{"name": "look", "arguments": {"at": "a'

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
        tokens=len(call("wait").removesuffix("}\n</tool_call>")),
        finish="tool_calls",
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "a stop string behind a call ends the answer, whose call is made",
        says=f"{call('wait')}\nDone STOP. {call('wait')}",
        ask=Ask(tools=BOTH, stop=("STOP",)),
        text="Done ",
        calls=[("wait", {})],
        finish="tool_calls",
        tokens=len(call("wait")) + len("\nDone STOP"),
    ),
    Behaviour(
        "what is no call after all may have a stop string",
        says=f"<tool_call>{{STOP {call('wait')}",
        ask=Ask(tools=BOTH, stop=("STOP",)),
        text="<tool_call>{",
        stopped_by="STOP",
    ),
    Behaviour(
        "a stop string does not go on behind a call",
        says=f"ST{call('wait')}OP STOP",
        ask=Ask(tools=BOTH, stop=("STOP",)),
        text="STOP ",
        calls=[("wait", {})],
        finish="tool_calls",
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
        for stop in ("<tool_call>", "look", "}}")
    ),
    *(
        Behaviour(
            f"a call that {choice} asks for satisfies its schema",
            says=None,
            ask=Ask(tools=BOTH, choice=choice, one_call=choice == "required", thinks=False),
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

CHOICES = (
    *(
        Behaviour(
            f"the choice {choice} of tools forbids calls",
            says=call("wait"),
            ask=Ask(tools=BOTH),
            fields={"tool_choice": choice},
            apis=apis,
        )
        for choice, apis in (
            ("none", OPENAIS),
            ({"type": "none"}, WITH_CHOICE),
        )
    ),
    *(
        Behaviour(
            f"the choice {choice} of tools lets the model call",
            says=call("wait"),
            ask=Ask(tools=BOTH),
            fields={"tool_choice": choice},
            text="",
            calls=[("wait", {})],
            finish="tool_calls",
            held=False,
            apis=apis,
        )
        for choice, apis in (
            (None, WITH_CHOICE),
            ("auto", OPENAIS),
            ({"type": "auto"}, WITH_CHOICE),
            ({"type": "auto", "disable_parallel_tool_use": False}, WITH_CHOICE),
        )
    ),
    *(
        Behaviour(
            f"the choice {choice} of tools makes the model call",
            says="No.",
            ask=Ask(tools=(WAIT,)),
            fields={"tool_choice": choice, "parallel_tool_calls": False},
            text="",
            calls=[("wait", {})],
            finish="tool_calls",
            held=True,
            apis=apis,
        )
        for choice, apis in (
            ({"type": "required"}, OPENAIS),
            ({"type": "required", "name": None}, OPENAIS),
            ({"type": "function", "function": {"name": "wait"}}, OPENAIS),
            ({"type": "function", "name": "wait"}, OPENAIS),
            ({"type": "any", "disable_parallel_tool_use": True}, (MESSAGES,)),
            ({"type": "tool", "name": "wait"}, (MESSAGES,)),
            (
                {"type": "allowed_tools", "allowed_tools": {
                    "mode": "required", "tools": [{"function": {"name": "wait"}}],
                }},
                (CHAT,),
            ),
            (
                {"type": "allowed_tools", "mode": "required", "tools": [{"name": "wait"}]},
                (RESPONSES,),
            ),
        )
    ),
    *(
        Behaviour(f"without tools the choice {choice} calls nothing", says=call("wait"),
                  fields={"tool_choice": choice}, apis=apis)
        for choice, apis in (
            ("auto", OPENAIS),
            ("none", OPENAIS),
            ({"type": "auto"}, (MESSAGES,)),
            ({"type": "none"}, (MESSAGES,)),
        )
    ),
)  # fmt: skip

BEHAVIOURS = (*CALLS, *CHOICES)

NAMED = {"name": "look", "parameters": PLACE}
OPENAI_NAMES = ("look", "", "a b", 'a"b', "a>b", "é", "x" * 129)
WRONG_TOOLS = (
    *(
        Refusal(f"a function cannot have the name {name!r:.12} of another or of no letters",
                bodies=({"tools": tools},), param=param, apis=(api,))
        for name in OPENAI_NAMES
        for api, tools, param in (
            (CHAT, [make_function(**NAMED), make_function(name=name)], "tools[1].function.name"),
            (OLLAMA, [make_function(**NAMED), make_function(name=name)], "tools[1].function.name"),
            (RESPONSES, [{"type": "function", "name": "look"}, {"type": "function", "name": name}],
             "tools[1].name"),
            (MESSAGES, [{"name": "look"}, {"name": name}], "tools[1].name"),
        )
    ),
    *(
        Refusal(f"a tool of {tool} is none that can be called",
                bodies=({"tools": [make_function(**NAMED), tool]},), param=param, apis=apis)
        for tool, param, apis in (
            ({"type": "custom", "custom": {"name": "f"}}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "web_search"}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "custom", "function": {"name": "f"}}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "function"}, "tools[1].function", (CHAT, OLLAMA)),
            ({"type": "function", "name": "f"}, "tools[1].function", (CHAT, OLLAMA)),
        )
    ),
    *(
        Refusal(f"a message's tool of {tool} is none", bodies=({"tools": [tool]},), param=param,
                apis=(MESSAGES,))
        for tool, param in (
            ({"type": "bash_20250124", "name": "bash"}, "tools[0]"),
            ({"type": "computer_toolset_20260801"}, "tools[0]"),
            ({"type": "", "name": "f"}, "tools[0]"),
            ({"input_schema": PLACE}, "tools[0].name"),
        )
    ),
    *(
        Refusal(f"a response's tools are functions with names: {label}",
                bodies=({"tools": tools},), param=param, apis=(RESPONSES,))
        for label, tools, param in (
            ("no name", [{"type": "function"}], "tools[0].name"),
            ("no type", [{"name": "x"}], "tools[0].type"),
            ("a space in a group", [{"type": "namespace", "name": "n", "tools": [
                {"type": "function", "name": "a"}, {"type": "function", "name": "b c"},
            ]}], "tools[0].tools[1].name"),
            ("a space in the group's", [{"type": "namespace", "name": "n m", "tools": [
                {"type": "function", "name": "a"},
            ]}], "tools[0].tools[0].name"),
            ("twice in a group", [{"type": "namespace", "name": "n", "tools": [
                {"type": "function", "name": "a"}, {"type": "function", "name": "a"},
            ]}], "tools[0].tools[1].name"),
        )
    ),
    Refusal("there are 256 tools at most", param="tools",
            message="There are 257 tools; at most 256", but={
                **{api: {"bodies": ({"tools": [make_function(name=f"f{n}") for n in range(257)]},)}
                   for api in (CHAT, OLLAMA)},
                RESPONSES: {"bodies": ({"tools": [
                    {"type": "function", "name": f"f{n}"} for n in range(257)]},)},
                MESSAGES: {"bodies": ({"tools": [{"name": f"f{n}"} for n in range(257)]},)},
            }),
    Refusal("tools are a list", "tools", (NAMED, "zebra")),
    Refusal("the schema of a tool that must be called can be enforced", param="tools",
            message="contains", apis=OPENAIS, but={
                CHAT: {"bodies": ({"tool_choice": "required", "tools": [make_function(
                    name="f", strict=True, parameters={"properties": {"a": {"contains": {}}}},
                )]},)},
                RESPONSES: {"bodies": ({"tool_choice": "required", "tools": [{
                    "type": "function", "name": "f", "strict": True,
                    "parameters": {"properties": {"a": {"contains": {}}}},
                }]},)},
            }),
)  # fmt: skip


def choose(choice: Any, api: Api) -> Json:
    """A request with a tool and a choice."""
    tool = make_function(**NAMED) if api is CHAT else {"type": "function", "name": "look"}
    return {"tools": [{"name": "look"} if api is MESSAGES else tool], "tool_choice": choice}


ALLOWED = "tool_choice.allowed_tools"
WRONG_CHOICES = (
    *(
        Refusal(f"nobody can choose {choice}", bodies=(choose(choice, api),), param=param,
                apis=(api,))
        for choice, param, apis in (
            ("any", "tool_choice", OPENAIS),
            ({"type": "function", "function": {"name": "write"}}, "tool_choice", OPENAIS),
            ({"type": "function"}, "tool_choice", OPENAIS),
            ({"type": "custom", "custom": {"name": "look"}}, "tool_choice", OPENAIS),
            ({"type": "web_search"}, "tool_choice", (RESPONSES,)),
            ({"type": "function", "name": "none"}, "tool_choice", (RESPONSES,)),
            ({"type": "namespace", "name": "look"}, "tool_choice", (RESPONSES,)),
            ({"type": "allowed_tools"}, f"{ALLOWED}.tools", (CHAT,)),
            ({"type": "allowed_tools"}, "tool_choice.tools", (RESPONSES,)),
            (
                {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "custom"}]}},
                f"{ALLOWED}.tools[0]",
                (CHAT,),
            ),
            (
                {"type": "allowed_tools", "tools": [{"name": "look"}, {"type": "web_search"}]},
                "tool_choice.tools[1]",
                (RESPONSES,),
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {
                    "mode": "some", "tools": [make_function(name="look")]}},
                f"{ALLOWED}.mode",
                (CHAT,),
            ),
            (
                {"type": "allowed_tools", "mode": "never", "tools": [{"name": "look"}]},
                "tool_choice.mode",
                (RESPONSES,),
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {
                    "tools": [make_function(name="look"), make_function(name="write")]}},
                "tool_choice",
                (CHAT,),
            ),
            ({"type": "tool", "name": "NAMED"}, "tool_choice.name", (MESSAGES,)),
            ({"type": "tool"}, "tool_choice.name", (MESSAGES,)),
            ("auto", "tool_choice", (MESSAGES,)),
        )
        for api in apis
    ),
    Refusal("nobody can choose a call without tools", bodies=({"tool_choice": "required"},),
            param="tool_choice", message="there are no tools", apis=WITH_CHOICE, but={
                MESSAGES: {"bodies": (
                    {"tool_choice": {"type": "any"}},
                    {"tool_choice": {"type": "tool", "name": "look"}},
                    {"tool_choice": {"type": "any"}, "tools": [{"type": "mcp_toolset"}]},
                )},
                RESPONSES: {"bodies": (
                    {"tool_choice": "required"},
                    {"tool_choice": "required", "tools": [{"type": "web_search"}]},
                    {"tool_choice": {"type": "function", "name": "look"}},
                )},
            }),
)  # fmt: skip

REFUSALS = (*WRONG_TOOLS, *WRONG_CHOICES)
