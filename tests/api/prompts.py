"""Rows: what a client sends, and what the model reads and the engine hears of it."""

import json
from typing import Any

from server.protocol.responses.items import packed_reasoning
from server.text.conversation import Tool, Turn
from tests.api.answers import BOTH, LOOK, PLACE, SILENT, THINKING, WAIT, WITH_CHOICE, call
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
    make_call,
)
from tests.server.harness import END, Json

SAMPLING = (*OPENAIS, MESSAGES, COMPLETIONS)
LEFT_OUT, NOT_SHOWN = "X-History-Left-Out", "X-Images-Not-Shown"
IMAGE = "[image not shown: this server reads text only]"
FILE = "[file not shown: this server reads text only]"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch=0f1e2;"
USER = {"role": "user", "content": "Hello"}
FROM_CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "a"}'}


def render(*turns: tuple[str, str], answer: str = "") -> str:
    """A rendered conversation. answer: what is begun of it."""
    lines = (f"<|im_start|>{role}\n{text}{END}\n" for role, text in turns)
    return "".join(lines) + f"<|im_start|>assistant\n{answer}"


def describe(*tools: Tool) -> str:
    """What a template writes of tools."""
    return "".join(json.dumps(tool.described) + "\n" for tool in tools)


def offer(*tools: Tool) -> tuple[str, str]:
    return "system", describe(*tools) + "<tool_call>"


def say(words: str, **more: Any) -> Json:
    return {"type": "text", "text": words, **more}


HELLO_READ = ("user", "Hello")
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

Sent = tuple[str, Json, list[tuple[str, str]], dict[str, str | None]]
SENT: tuple[Sent, ...] = (
    (
        "a system prompt in blocks, of which each is one",
        {"system": [say("Be brief."), say("Be kind.", **EPHEMERAL)]},
        [("system", "Be brief.\n\nBe kind."), HELLO_READ],
        {},
    ),
    (
        "blocks of a late system's message as paragraphs",
        {"messages": [USER, {"role": "system", "content": [
            say("One."), say(""), say("Two."),
        ]}]},
        [HELLO_READ, ("system", "One.\n\nTwo.")],
        {},
    ),
    (
        "an empty system's message, which is none",
        {"messages": [USER, {"role": "system", "content": ""}]},
        [HELLO_READ],
        {},
    ),
    (
        "lines of billing, which are no part of a prompt",
        {"system": [say(f"{BILLING}\n\n"), say(f"{BILLING}\nBe brief.\nVery.")]},
        [("system", "Be brief.\nVery."), HELLO_READ],
        {},
    ),
    (
        "lines of billing in a text",
        {"system": f"\n{BILLING}\nBe brief."},
        [("system", "Be brief."), HELLO_READ],
        {},
    ),
    (
        "what looks like billing later on, which is text",
        {"system": f"Be brief.\n{BILLING}"},
        [("system", f"Be brief.\n{BILLING}"), HELLO_READ],
        {},
    ),
    (
        "several thoughts, which stay apart, and ciphers, which nobody reads",
        {"messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "One.", "signature": "x"},
            {"type": "redacted_thinking", "data": "cipher"},
            {"type": "thinking", "thinking": None},
            {"type": "thinking", "thinking": "Two."},
            say("Let me"), say(" look."),
            {"type": "tool_use", "name": "wait", "input": None},
            {"type": "tool_use", "name": "wait", "input": "{}"},
        ]}, USER]},
        [
            HELLO_READ,
            ("assistant", "<think>\nOne.\n\n\n\nTwo.\n</think>\n\nLet me look.\n"
             f"{call('wait')}\n{call('wait')}"),
            HELLO_READ,
        ],
        {},
    ),
    (
        "results and words in any order, which is kept",
        {"messages": [USER, {"role": "assistant", "content": "Well."}, {
            "role": "user", "content": [
                say("Before."),
                {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "b", "content": [
                    say("22"), say(" degrees"),
                ]},
                {"type": "tool_result", "tool_use_id": "c", "content": None},
                say("And"), say(" now?"),
            ],
        }]},
        [
            HELLO_READ, ("assistant", "Well."), ("user", "Before."), ("tool", "sunny"),
            ("tool", "22 degrees"), ("tool", ""), ("user", "And now?"),
        ],
        {},
    ),
    (
        "a message of nothing, which is one",
        {"messages": [{"role": "user", "content": []}]},
        [("user", "")],
        {},
    ),
    *(
        (
            f"a result with is_error {failed}, which is heard as {heard!r}",
            {"messages": [USER, {"role": "user", "content": [{
                "type": "tool_result", "tool_use_id": "a", "is_error": failed,
                "content": words,
            }]}]},
            [HELLO_READ, ("tool", heard)],
            {},
        )
        for failed, words, heard in (
            (True, "no such file", "Error: no such file"),
            (True, "error 5", "error 5"),
            (False, "no file", "no file"),
            (None, "no disk", "no disk"),
        )
    ),
    (
        "an image and a file, of which the model is told",
        {"messages": [{"role": "user", "content": [
            say("What?"), {"type": "image", "source": {}},
            {"type": "document", "source": {"type": "url", "url": "x"}},
        ]}]},
        [("user", f"What?{IMAGE}{FILE}")],
        {NOT_SHOWN: "2"},
    ),
    (
        "images that a tool has shown",
        {"messages": [USER, {"role": "user", "content": [{
            "type": "tool_result", "tool_use_id": "a", "content": [
                {"type": "image", "source": {}}, {"type": "document", "source": {}},
            ],
        }]}]},
        [HELLO_READ, ("tool", IMAGE + FILE)],
        {NOT_SHOWN: "2"},
    ),
    *(
        (
            f"a document of the source {source}",
            {"messages": [{"role": "user", "content": [
                {"type": "document", "source": source},
            ]}]},
            [("user", heard)],
            {NOT_SHOWN: shown},
        )
        for source, heard, shown in (
            ({"type": "text", "data": "A note."}, "A note.", None),
            ({"type": "content", "content": "A note."}, "A note.", None),
            (
                {"type": "content", "content": [say("A note."), {"type": "image"}]},
                f"A note.{IMAGE}",
                "1",
            ),
            ({"type": "content"}, FILE, "1"),
            (None, FILE, "1"),
        )
    ),
    *(
        (
            f"a block of {block}",
            {"messages": [{"role": "user", "content": [block, say("And?")]}]},
            [("user", f"{heard}And?")],
            {LEFT_OUT: left_out},
        )
        for block, heard, left_out in (
            ({"type": "tool_reference", "tool_name": "find"}, "find\n", None),
            (
                {"type": "search_result", "source": "https://e.org", "title": "A page",
                 "content": [say("abc")], "citations": {"enabled": True}},
                "A page\nhttps://e.org\nabc\n",
                None,
            ),
            ({"type": "compaction", "content": "They talked."}, "They talked.", None),
            ({"type": "compaction", "content": None}, "", None),
            ({"type": "server_tool_use", "id": 5, "input": {}}, "", "server_tool_use=1"),
            ({"type": "tool_use", "name": "look"}, "", "tool_use=1"),
            ({"type": "thinking", "thinking": "Hm."}, "", "thinking=1"),
            ({"type": "redacted_thinking", "data": "x"}, "", "redacted_thinking=1"),
            ({"type": "mcp_tool_result", "content": "x"}, "", "mcp_tool_result=1"),
            ({"type": "zebra", "text": 5}, "", "zebra=1"),
            ({"type": "Zebra!", "text": 5}, "", "unknown=1"),
            (
                {"type": "tool_addition", "tool": {"type": "mcp_toolset"}},
                "",
                "tool_addition=1",
            ),
        )
    ),
)  # fmt: skip

BLOCKS = (
    *(
        Behaviour(
            f"anthropic's client may send {label}",
            fields=fields,
            prompt=render(*turns),
            headers=headers,
            apis=(MESSAGES,),
        )
        for label, fields, turns, headers in SENT
    ),
    *(
        Behaviour(
            f"a tool of the type {kind}, which Anthropic's servers run, is left out",
            fields={"tools": [{"type": kind, "name": "x"}, {"type": "custom", "name": "wait"}]},
            prompt=render(offer(Tool("wait")), HELLO_READ),
            apis=(MESSAGES,),
        )
        for kind in (
            "web_search_20250305", "web_fetch_20250910", "code_execution_20250825",
            "tool_search_tool_regex_20251119", "mcp_toolset", "advisor_20260301",
        )
    ),
)  # fmt: skip


def make_message(role: str, *parts: Json) -> Json:
    return {"type": "message", "role": role, "content": list(parts)}


def answer_item(words: str, **more: Any) -> Json:
    return make_message("assistant", say(words)) | more


ITEMS = (
    Behaviour("an input may be a text", fields={"input": "Hello"}, prompt=render(HELLO_READ),
              apis=(RESPONSES,)),
    Behaviour(
        "instructions come before all that was said",
        fields={"instructions": "Be brief."},
        prompt=render(("system", "Be brief."), HELLO_READ),
        apis=(RESPONSES,),
    ),
    Behaviour(
        "empty instructions are none",
        fields={"instructions": ""},
        prompt=render(HELLO_READ),
        apis=(RESPONSES,),
    ),
    *(
        Behaviour(
            f"an item of {item} is read",
            fields={"input": [USER, item]},
            prompt=render(HELLO_READ, *turns),
            headers=headers,
            apis=(RESPONSES,),
        )
        for item, turns, headers in (
            (
                make_message("assistant", {"type": "refusal", "refusal": "No."}),
                [("assistant", "No.")],
                {},
            ),
            (FROM_CALL, [("assistant", call("look", at="a"))], {}),
            (FROM_CALL | {"arguments": {"at": "a"}}, [("assistant", call("look", at="a"))], {}),
            (
                FROM_CALL | {"namespace": "mcp__x", "arguments": "{}"},
                [("assistant", call("mcp__x.look"))],
                {},
            ),
            (
                {"type": "function_call_output", "call_id": "c", "output": [
                    {"type": "input_text", "text": "sun"}, {"type": "text", "text": "ny"},
                ]},
                [("tool", "sunny")],
                {},
            ),
            ({"type": "function_call_output", "call_id": "c", "output": None}, [("tool", "")], {}),
            (
                {"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": "*** é"},
                [("assistant", call("apply", input="*** é"))],
                {},
            ),
            (
                {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
                [("tool", "Done")],
                {},
            ),
            (
                {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
                [("assistant", call("local_shell", command=["ls"]))],
                {},
            ),
            (
                {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
                [("tool", "a.txt")],
                {},
            ),
            (
                {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
                [("assistant", call("tool_search", query="x"))],
                {},
            ),
            (
                {"type": "tool_search_call", "call_id": "c", "arguments": '{"query": "x"}'},
                [("assistant", call("tool_search", query="x"))],
                {},
            ),
            (
                {"type": "tool_search_call", "call_id": "c", "arguments": ["x"]},
                [("assistant", call("tool_search", input=None))],
                {},
            ),
            ({"type": "additional_tools", "tools": []}, [], {}),
            (
                {"type": "agent_message", "author": "worker a", "content": [
                    {"type": "input_text", "text": "Payload:\n"},
                    {"type": "encrypted_content", "encrypted_content": "Look at it."},
                    {"type": "encrypted_content", "encrypted_content": "gAAAAABo"},
                ]},
                [("user", "Message from worker a:\nPayload:\nLook at it.")],
                {LEFT_OUT: "encrypted_content=1"},
            ),
            (
                {"type": "agent_message", "author": "/root", "content": "Go on."},
                [("user", "Message from /root:\nGo on.")],
                {},
            ),
            (
                make_message("user", {"type": "input_image", "image_url": "data:,"}),
                [("user", IMAGE)],
                {NOT_SHOWN: "1"},
            ),
            (
                {"type": "function_call_output", "call_id": "c", "output": [
                    {"type": "input_image", "image_url": "data:,"},
                    {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
                ]},
                [("tool", IMAGE + FILE)],
                {NOT_SHOWN: "2"},
            ),
            *(
                (item, [], {LEFT_OUT: f"{item['type']}=1"})
                for item in (
                    {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
                    {"type": "compaction", "encrypted_content": "gAAAA"},
                    {"type": "computer_call", "action": 5},
                    {"type": "mcp_call", "name": 5, "output": {"a": 1}},
                    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"},
                    {"type": "reasoning", "encrypted_content": "quire1.%"},
                    {"type": "reasoning", "encrypted_content": "quire1.YQ"},
                    {"type": "reasoning", "encrypted_content": "quire1./w=="},
                    {"type": "reasoning", "encrypted_content": "quire1.é"},
                )
            ),
        )
    ),
    *(
        Behaviour(
            f"tools that the item {kind} brings are offered, and read by the {role} in their place",
            fields={"input": [USER, {"type": kind, "call_id": "c", "tools": [
                {"type": "function", "name": "wait"}, {"type": "custom"},
            ]}]},
            prompt=render(offer(Tool("wait")), HELLO_READ, (role, describe(Tool("wait")))),
            apis=(RESPONSES,),
        )
        for kind, role in (("tool_search_output", "tool"), ("additional_tools", "system"))
    ),
    Behaviour(
        "of many kinds that nobody reads the first are named",
        fields={"input": [{"type": f"zebra_{n:02}"} for n in range(20)] + [{"type": "a=1"}, USER]},
        prompt=render(HELLO_READ),
        headers={LEFT_OUT: ", ".join(["unknown=5", *(f"zebra_{n:02}=1" for n in range(16))])},
        apis=(RESPONSES,),
    ),
    *(
        Behaviour(
            f"thoughts of {fields} are read as {thoughts!r}",
            fields={"input": [USER, {"type": "reasoning"} | fields, answer_item("A.")]},
            prompt=render(
                HELLO_READ,
                ("assistant", f"<think>\n{thoughts}\n</think>\n\nA." if thoughts else "A."),
            ),
            apis=(RESPONSES,),
        )
        for fields, thoughts in (
            ({"content": [{"type": "reasoning_text", "text": "a"}, {"text": "b"}]}, "ab"),
            ({"encrypted_content": packed_reasoning("Grüße")}, "Grüße"),
            ({"content": None, "summary": [{"text": "s"}, {"text": "t"}]}, "s\n\nt"),
            ({"content": [{"text": "a"}], "encrypted_content": "gA", "summary": []}, "a"),
            ({"encrypted_content": packed_reasoning("p"), "summary": [{"text": "s"}]}, "p"),
            ({"encrypted_content": "gAAAAABo", "summary": [{"text": "It looked."}]}, "It looked."),
            ({"encrypted_content": ""}, ""),
        )
    ),
    *(
        Behaviour(
            f"a turn of {label} ends where another one must have begun",
            fields={"input": [USER, *items, USER]},
            prompt=render(HELLO_READ, *turns, HELLO_READ),
            apis=(RESPONSES,),
        )
        for label, items, turns in (
            (
                "thoughts, a text and calls",
                [
                    {"type": "reasoning", "content": [{"text": "Hm."}]},
                    answer_item("Sure."), FROM_CALL, FROM_CALL,
                ],
                [("assistant", "<think>\nHm.\n</think>\n\nSure.\n"
                  + "\n".join([call("look", at="a")] * 2))],
            ),
            (
                "two calls and what came of one between them",
                [FROM_CALL, {"type": "function_call_output", "output": "b"}, FROM_CALL],
                [("assistant", call("look", at="a")), ("tool", "b"),
                 ("assistant", call("look", at="a"))],
            ),
            (
                "two texts",
                [answer_item("a"), answer_item("b")],
                [("assistant", "a"), ("assistant", "b")],
            ),
            (
                "a text around a call",
                [answer_item("a"), FROM_CALL, answer_item("b")],
                [("assistant", f"ab\n{call('look', at='a')}")],
            ),
            (
                "two thoughts",
                [
                    {"type": "reasoning", "content": [{"text": "a"}]},
                    {"type": "reasoning", "content": [{"text": "b"}]},
                    answer_item("c"),
                ],
                [("assistant", "<think>\na\nb\n</think>\n\nc")],
            ),
            (
                "a text before a thought",
                [
                    answer_item("a"),
                    {"type": "reasoning", "content": [{"text": "b"}]},
                    answer_item("c"),
                ],
                [("assistant", "a"), ("assistant", "<think>\nb\n</think>\n\nc")],
            ),
            (
                "a text that is begun, and its rest",
                [
                    answer_item("a") | {"prefix": True},
                    answer_item("b") | {"prefix": True},
                    answer_item("c"),
                    answer_item("d"),
                ],
                [("assistant", "abc"), ("assistant", "d")],
            ),
            (
                "thoughts that are begun, and their rest",
                [
                    {"type": "reasoning", "content": [{"text": "a"}], "prefix": True},
                    {"type": "reasoning", "content": [{"text": "b"}]},
                    answer_item("c"),
                ],
                [("assistant", "<think>\nab\n</think>\n\nc")],
            ),
        )
    ),
    Behaviour(
        "tools that are no functions are left out",
        fields={"tools": [
            {"type": "tool_search", "execution": 5},
            {"type": "web_search", "filters": None},
            {"type": "custom", "name": "look", "format": {"type": "text"}},
            {"type": "mcp", "server_label": "x", "parameters": "none"},
            {"type": "function", "name": "wait", "defer_loading": True},
        ]},
        prompt=render(offer(Tool("wait")), HELLO_READ),
        apis=(RESPONSES,),
    ),
    Behaviour(
        "what says nothing is let pass",
        fields={
            "n": 1, "truncation": "auto", "context_management": [{"type": "compaction"}],
            "background": False, "include": ["x.y"],
            "reasoning": {"context": "auto", "mode": "standard", "generate_summary": "auto"},
        },
        prompt=render(HELLO_READ),
        apis=(RESPONSES,),
    ),
)  # fmt: skip

THINKING_ROWS = (
    *(
        Behaviour(
            f"{fields} turns thoughts off",
            fields=fields,
            prompt=render(HELLO_READ, answer=SILENT),
            held=False,
            apis=apis,
        )
        for fields, apis in (
            ({"chat_template_kwargs": {"enable_thinking": False}}, WITH_CHOICE),
            ({"enable_thinking": False}, WITH_CHOICE),
            (
                {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
                WITH_CHOICE,
            ),
            ({"reasoning_effort": "none"}, OPENAIS),
            ({"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, OPENAIS),
            ({"reasoning": {"enabled": False, "exclude": True}}, OPENAIS),
            ({"reasoning": {"enabled": True}, "enable_thinking": False}, OPENAIS),
            ({"reasoning_effort": "high", "enable_thinking": False}, OPENAIS),
            ({"thinking": {"type": "disabled"}}, (MESSAGES,)),
            ({"thinking": {"type": "between_tools"}}, (MESSAGES,)),
            (
                {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
                (MESSAGES,),
            ),
            ({"think": False}, (OLLAMA, GENERATE)),
        )
    ),
    *(
        Behaviour(
            f"{fields} lets the model think{', within a budget' * held}",
            fields=fields,
            prompt=render(HELLO_READ),
            held=held,
            apis=apis,
        )
        for fields, held, apis in (
            ({"chat_template_kwargs": {"enable_thinking": True}}, False, WITH_CHOICE),
            ({"chat_template_kwargs": {"enable_thinking": None}}, False, WITH_CHOICE),
            ({"reasoning_effort": "minimal"}, True, OPENAIS),
            ({"reasoning_effort": "low"}, True, OPENAIS),
            ({"reasoning_effort": "medium"}, True, OPENAIS),
            ({"reasoning_effort": "high"}, False, OPENAIS),
            ({"reasoning_effort": "xhigh"}, False, OPENAIS),
            ({"reasoning_effort": "max"}, False, OPENAIS),
            ({"reasoning": {}}, False, OPENAIS),
            ({"reasoning": {"effort": "low", "summary": "auto"}}, True, OPENAIS),
            ({"reasoning": {"max_tokens": 5.0}}, True, OPENAIS),
            ({"thinking_token_budget": 0}, True, OPENAIS),
            ({"thinking": {"type": "adaptive", "display": "omitted"}}, False, (MESSAGES,)),
            ({"thinking": {"type": "enabled"}}, False, (MESSAGES,)),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, (MESSAGES,)),
            ({"output_config": {"effort": "low"}}, True, (MESSAGES,)),
            ({"output_config": {"effort": "high"}}, False, (MESSAGES,)),
            ({"think": True}, False, (OLLAMA, GENERATE)),
            ({"think": "low"}, True, (OLLAMA, GENERATE)),
            ({"think": "high"}, False, (OLLAMA, GENERATE)),
        )
    ),
)

EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.5,
    "seed": 42,
}
WITHOUT = {"temperature": None, "top_p": None, "seed": None, "stop": None, "top_k": None}
PARAMETERS = (
    Behaviour(
        "every parameter reaches the engine",
        ask=Ask(length=1),
        is_read=False,
        fields=EVERYTHING | {
            "repetition_penalty": 1.5, "logit_bias": {"5": -100, "99": 2.5}, "min_tokens": 1,
            "stop_token_ids": [990], "priority": -3,
        },
        heard=EVERYTHING | {
            "repetition_penalty": 1.5, "logit_bias": ((5, -100.0), (99, 2.5)), "min_tokens": 1,
            "priority": -3, "max_tokens": 1,
        },
        apis=(*SAMPLING, OLLAMA, GENERATE),
        but={
            api: {
                "fields": {"options": EVERYTHING | {
                    "repeat_penalty": 1.5, "repeat_last_n": -1, "num_ctx": 17, "heard_of": "no",
                }},
                "heard": EVERYTHING | {"repetition_penalty": 1.5, "max_tokens": 1},
            }
            for api in (OLLAMA, GENERATE)
        },
    ),
    Behaviour(
        "who says nothing gets openai's defaults",
        ask=Ask(length=1),
        is_read=False,
        fields=WITHOUT,
        heard={
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "priority": 0,
            "min_tokens": 0,
        },
        apis=(*SAMPLING, OLLAMA),
        but={OLLAMA: {"fields": {"options": WITHOUT}}},
    ),
    *(
        Behaviour(
            f"{name} {given} is taken for {taken}",
            ask=Ask(length=1),
            is_read=False,
            fields={name: given},
            heard={name: taken},
            apis=(*SAMPLING, OLLAMA),
            but={OLLAMA: {"fields": {"options": {name: given}}}},
        )
        for name, given, taken in (
            ("temperature", 1e-38, 0.0),
            ("top_p", 1e-46, 1e-6),
            ("top_p", 0, 1e-6),
            ("top_k", -1, 0),
            ("top_k", 20.0, 20),
            ("seed", 0, 0),
            ("seed", 7.0, 7),
            ("seed", -2, 2**64 - 2),
            ("seed", 2**63 - 1, 2**63 - 1),
        )
    ),
    *(
        Behaviour(
            f"of repeat_last_n {last} the penalties are {kept}",
            fields={"options": {
                "repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1,
                "repeat_last_n": last,
            }},
            heard={
                "repetition_penalty": 1.5 if kept else 1.0,
                "presence_penalty": kept, "frequency_penalty": kept,
            },
            apis=(OLLAMA, GENERATE),
        )
        for last, kept in ((0, 0), (64, 1), (-1.0, 1))
    ),
    Behaviour(
        "options that Ollama's page shows are taken",
        fields={"options": {
            "num_keep": 5, "seed": 42.0, "top_k": 20, "typical_p": 0.7, "repeat_last_n": 33,
            "penalize_newline": True, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6,
            "tfs_z": 0.5, "numa": False, "num_ctx": 1024, "num_batch": 2.0, "num_gpu": 1,
            "main_gpu": 0, "low_vram": False, "use_mmap": True, "num_thread": 8,
        }},
        heard={"seed": 42, "top_k": 20},
        apis=(OLLAMA, GENERATE),
    ),
    Behaviour(
        "null is as if a field were not there",
        fields=dict.fromkeys((
            "model", "top_k", "min_p", "presence_penalty", "frequency_penalty", "n", "logit_bias",
            "cache_report", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "seed",
            "tools", "tool_choice", "parallel_tool_calls", "response_format", "enable_thinking",
            "chat_template_kwargs", "reasoning", "think", "format", "images", "keep_alive",
            "best_of", "suffix", "echo", "logprobs", "top_logprobs", "user", "metadata",
        )),
        apis=ALL,
    ),
    Behaviour(
        "fields that cannot change an answer are ignored",
        fields={
            "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
            "zebra": [None], "model_fields": 1, "_private": {}, "a b": [1],
        },
        apis=ALL,
    ),
    Behaviour(
        "a text may be given as ids",
        fields={"prompt": [39, 40]},
        prompt="HI",
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "no fields that say nothing are refused",
        fields={"suffix": "", "best_of": 1, "echo": False},
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "empty lists of tools are none",
        says=call("wait"),
        fields={"tools": []},
        prompt=render(HELLO_READ),
        apis=FOUR,
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

PROMPTS = (*CONVERSATIONS, *BLOCKS, *ITEMS, *THINKING_ROWS, *PARAMETERS, *CHOICES)
