"""Rows: turns, what the model reads of them, and answers that are gone on with."""

import json
from typing import Any

from server.text.conversation import Tool, ToolCall, Turn
from tests.api.conftest import MAX_LEN
from tests.api.table import (
    ALL,
    CHAT,
    COMPLETIONS,
    FOUR,
    GENERATE,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    THINKING,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import HELLO, Ask
from tests.api.words import (
    BOTH,
    EPHEMERAL,
    HELLO_READ,
    LIMITS,
    LOOK,
    PLACE,
    SILENT,
    SURROGATE,
    USER,
    WAIT,
    add_parts,
    call,
    offer,
    render,
    say,
)
from tests.server.harness import END


def make_call(name: str, **arguments: Any) -> ToolCall:
    """A call in an earlier turn."""
    return ToolCall("call_1", name, json.dumps(arguments, ensure_ascii=False))


TALK = (
    HELLO,
    Turn("assistant", "Sure.", "Hm.", (make_call("look", at="Grüße", n=[1, 2.5]),)),
    Turn("tool", "sunny", tool_call_id="call_1"),
    Turn("user", "And now?"),
)
TALK_READ = (
    HELLO_READ,
    (
        "assistant",
        f"<think>\nHm.\n</think>\n\nSure.\n{call('look', at='Grüße', n=[1, 2.5])}",
    ),
    ("tool", "sunny"),
    ("user", "And now?"),
)

CONVERSATIONS = (
    Behaviour("a question is one turn", prompt=render(HELLO_READ), apis=THINKING),
    Behaviour(
        "the system's prompt comes first",
        ask=Ask((Turn("system", "Be brief."), HELLO)),
        prompt=render(("system", "Be brief."), HELLO_READ),
        apis=THINKING,
    ),
    Behaviour(
        "a system's message may come at any time",
        ask=Ask((HELLO, Turn("system", "In French."), HELLO)),
        prompt=render(HELLO_READ, ("system", "In French."), HELLO_READ),
    ),
    Behaviour(
        "calls, what came of them and thoughts make the same prompt everywhere",
        ask=Ask(TALK, tools=(LOOK,)),
        prompt=render(offer(LOOK), *TALK_READ),
    ),
    Behaviour(
        "tools are described in their order",
        ask=Ask(tools=(Tool("see", "Sees.", PLACE), WAIT)),
        prompt=render(offer(Tool("see", "Sees.", PLACE), WAIT), HELLO_READ),
    ),
    Behaviour(
        "tools that may not be called are not described",
        ask=Ask(tools=BOTH, choice="none"),
        prompt=render(HELLO_READ),
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "a developer is the system, and a text may come in parts",
        prompt=render(("system", "Be brief."), HELLO_READ),
        apis=OPENAIS,
        but={
            CHAT: {"fields": {"messages": [
                {"role": "developer", "content": [say("Be "), "brief."]},
                {"role": "user", "content": [say("Hel"), say("lo", **EPHEMERAL)], "name": "me"},
            ]}},
            RESPONSES: {"fields": {"input": [
                {"type": "message", "role": "developer", "content": [
                    {"type": "input_text", "text": "Be "}, {"type": "text", "text": "brief."},
                ]},
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            ]}},
        },
    ),
    Behaviour(
        "older names of thoughts, calls and what came of them are known",
        fields={"messages": [
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "Hm.",
             "function_call": {"name": "look", "arguments": {"at": "a"}}},
            {"role": "function", "name": "look", "content": "sunny"},
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No!"}]},
        ]},
        prompt=render(
            HELLO_READ,
            ("assistant", f"<think>\nHm.\n</think>\n\n{call('look', at='a')}"),
            ("tool", "sunny"),
            ("assistant", "No."),
            ("assistant", "No!"),
        ),
        apis=(CHAT,),
    ),
)  # fmt: skip

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

BEHAVIOURS = (*CONVERSATIONS, *CONTINUED)

MANY = {"messages": [USER] * (LIMITS.max_messages + 1)}
WRONG_TURNS = (
    *(
        Refusal(f"a chat's messages cannot be {label}", bodies=({"messages": messages},),
                param=param, apis=apis)
        for label, messages, param, apis in (
            ("none", [], "messages", (CHAT, MESSAGES)),
            ("nothing", None, "messages", (CHAT, MESSAGES)),
            ("a text", "Hello", "messages", (CHAT, MESSAGES, OLLAMA)),
            ("texts", ["Hello"], "messages[0]", (CHAT, MESSAGES, OLLAMA)),
            ("of nobody", [{"content": "Hello"}], "messages[0].role", (CHAT, MESSAGES, OLLAMA)),
            ("of a robot", [{"role": "robot", "content": "x"}], "messages[0].role",
             (CHAT, MESSAGES, OLLAMA)),
            ("a number", [USER, USER | {"content": 5}], "messages[1].content",
             (CHAT, OLLAMA)),
            ("parts without a type", [USER | {"content": [{"text": "x"}]}],
             "messages[0].content", (CHAT,)),
            ("blocks without a type", [USER | {"content": [{"text": "x"}]}],
             "messages[0].content[0].type", (MESSAGES,)),
            ("calls of a text", [{"role": "assistant", "tool_calls": "f"}],
             "messages[0].tool_calls", (CHAT, OLLAMA)),
            ("a call of no function", [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
             "messages[0].tool_calls[0]", (CHAT,)),
            ("spoken", [USER, USER | {"audio": {"id": "a"}}], "messages[1].audio", (CHAT,)),
            ("heard", add_parts("user", {"type": "input_audio"}), "messages[1].content[0]",
             (CHAT, MESSAGES)),
            ("an image", add_parts("user", {"type": "image_url", "image_url": {"url": "x"}}),
             "messages[1].content[0]", (CHAT,)),
            ("an image beside a text", [USER | {"images": ["x"]}], "messages[0].images[0]",
             (OLLAMA,)),
            ("a use without a name", add_parts("assistant", {"type": "tool_use", "input": {}}),
             "messages[1].content[0].name", (MESSAGES,)),
        )
    ),
    *(
        Refusal(f"an input cannot be {label}", bodies=({"input": given},), param=param,
                apis=(RESPONSES,))
        for label, given, param in (
            ("nothing", None, "input"),
            ("empty", [], "input"),
            ("a number", 5, "input"),
            ("numbers", [5], "input[0]"),
            ("of nobody", [{"content": "x"}], "input[0].role"),
            ("of a robot", [{"role": "robot", "content": "x"}], "input[0].role"),
            ("a message of a number", [{"role": "user", "content": 5}], "input[0].content"),
            ("an item of no type", [{"type": 5}], "input[0].type"),
            ("a call without a name", [USER, {"type": "function_call"}], "input[1].name"),
            ("a reference to nothing", [{"type": "item_reference"}], "input[0].id"),
            ("a thought of a text", [{"type": "reasoning", "content": "x"}], "input[0].content"),
            ("heard", add_parts("user", {"type": "input_audio"}), "input[1].content[0]"),
            ("what is not stored", [USER, {"type": "item_reference", "id": "msg_0"}], "input[1]"),
            ("an id alone that is not stored", [USER, {"id": "msg_0"}], "input[1]"),
            ("what nobody reads", [{"type": "computer_call"}], "input"),
        )
    ),
    Refusal("there are so many messages at most", param="messages", bodies=(MANY,),
            message=f"at most {LIMITS.max_messages}", apis=FOUR, but={
                RESPONSES: {"param": "input", "bodies": ({"input": MANY["messages"]},)},
            }),
    Refusal("a system's message alone asks nothing", param="messages", apis=(MESSAGES,),
            bodies=({"messages": [{"role": "system", "content": ""}]},)),
    Refusal("an image beside a prompt is not shown", bodies=({"images": ["x"]},),
            param="images[0]", apis=(GENERATE,)),
    Refusal("metadata are texts", bodies=({"metadata": {"a": 1}},), param="metadata.a",
            apis=(RESPONSES,)),
    Refusal("what is not stored cannot be gone on with", "previous_response_id", ("resp_0", ""),
            message="as input", apis=(RESPONSES,)),
    Refusal("a prompt that does not fit is too long", "messages", apis=ALL,
            message=f"maximum context length is {MAX_LEN} tokens", but={
                CHAT: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},)},
                RESPONSES: {"bodies": ({"input": "x" * MAX_LEN},)},
                MESSAGES: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},),
                           "message": f"prompt is too long: 919 tokens > {MAX_LEN - 1} maximum",
                           "param": "prompt"},
                OLLAMA: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},)},
                COMPLETIONS: {"bodies": ({"prompt": "x" * MAX_LEN}, {"prompt": [1] * MAX_LEN},
                                         {"prompt": "x" * 10**6}), "param": "prompt"},
                GENERATE: {"bodies": ({"prompt": "x" * MAX_LEN},), "param": None},
            }),
    Refusal("half of a character is named by its place", apis=(CHAT, MESSAGES, OLLAMA),
            bodies=({"messages": [USER | {"content": SURROGATE}]},), param="messages[0].content",
            message="half of a surrogate pair"),
)  # fmt: skip

WRONG_BEGINNINGS = (
    *(
        Refusal(f"what {label} cannot be gone on with", bodies=(
            {name: turns} | fields,), param=where, apis=(api,))
        for label, turns, fields, where_by_api in (
            ("the user said last", [USER], {"continue_final_message": True},
             {CHAT: "continue_final_message", RESPONSES: "continue_final_message"}),
            ("is begun and is a new turn", [USER, {"role": "assistant", "content": "Once"}],
             {"continue_final_message": True, "add_generation_prompt": True},
             {CHAT: "add_generation_prompt", RESPONSES: "add_generation_prompt"}),
            ("is to have no new turn", [USER], {"add_generation_prompt": False},
             {CHAT: "add_generation_prompt", RESPONSES: "add_generation_prompt"}),
            ("is begun before another's turn",
             [USER, {"role": "assistant", "content": "Once", "prefix": True}, USER], {},
             {CHAT: "messages[1].prefix", RESPONSES: "input[1].prefix"}),
            ("the user begins", [USER | {"prefix": True}], {},
             {CHAT: "messages[0].prefix", RESPONSES: "input[0].prefix"}),
            ("has no question", [{"role": "assistant", "content": "Once"}],
             {"continue_final_message": True},
             {CHAT: "messages", MESSAGES: "messages", OLLAMA: "messages", RESPONSES: "input"}),
        )
        for api, where in where_by_api.items()
        for name in ("input" if api is RESPONSES else "messages",)
    ),
    Refusal("a call cannot be gone on with", apis=WITH_CHOICE, param="messages",
            bodies=({"continue_final_message": True, "messages": [USER, {
                "role": "assistant", "content": "Once",
                "tool_calls": [{"function": {"name": "look"}}],
            }]},), but={
                MESSAGES: {"bodies": ({"messages": add_parts(
                    "assistant", {"type": "tool_use", "id": "a", "name": "look"})},)},
                RESPONSES: {"param": "input", "bodies": ({"continue_final_message": True, "input": [
                    USER, {"type": "function_call", "call_id": "a", "name": "look"},
                ]},)},
            }),
)  # fmt: skip

REFUSALS = (*WRONG_TURNS, *WRONG_BEGINNINGS)
