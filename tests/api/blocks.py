"""Rows: blocks of Anthropic's clients, and what the model reads of them."""

from server.text.conversation import Tool
from tests.api.table import MESSAGES, Behaviour
from tests.api.words import (
    EPHEMERAL,
    FILE,
    HELLO_READ,
    IMAGE,
    LEFT_OUT,
    NOT_SHOWN,
    USER,
    call,
    offer,
    render,
    say,
)
from tests.server.harness import Json

BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch=0f1e2;"

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

BEHAVIOURS = (
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
