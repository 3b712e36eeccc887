"""Rows: items of responses, and what the model reads of them."""

from typing import Any

from server.protocol.responses.items import packed_reasoning
from server.text.conversation import Tool
from tests.api.table import RESPONSES, Behaviour
from tests.api.words import (
    FILE,
    HELLO_READ,
    IMAGE,
    LEFT_OUT,
    NOT_SHOWN,
    USER,
    call,
    describe,
    offer,
    render,
    say,
)
from tests.server.harness import Json

FROM_CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "a"}'}


def make_message(role: str, *parts: Json) -> Json:
    return {"type": "message", "role": role, "content": list(parts)}


def answer_item(words: str, **more: Any) -> Json:
    return make_message("assistant", say(words)) | more


BEHAVIOURS = (
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
