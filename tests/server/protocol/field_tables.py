"""Write server/protocol/FIELDS.md: ``python -m tests.server.protocol.field_tables``."""

from collections import defaultdict
from pathlib import Path

from server.protocol.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDING_FIELDS,
    TOKENIZE_FIELDS,
    Rule,
)
from server.protocol.messages.request import MESSAGES_FIELDS
from server.protocol.ollama.options import (
    OLLAMA_CHAT_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDINGS_FIELDS,
    OLLAMA_GENERATE_FIELDS,
    OPTION_FIELDS,
    SHOW_FIELDS,
)
from server.protocol.responses.request import RESPONSES_FIELDS

DOCUMENT = Path(__file__).parents[3] / "server" / "protocol" / "FIELDS.md"
TABLES = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/embeddings": EMBEDDING_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
    "/api/chat": OLLAMA_CHAT_FIELDS,
    "/api/generate": OLLAMA_GENERATE_FIELDS,
    "options of both": OPTION_FIELDS,
    "/api/embed": OLLAMA_EMBED_FIELDS,
    "/api/embeddings": OLLAMA_EMBEDDINGS_FIELDS,
    "/api/show": SHOW_FIELDS,
}
CHAT, COMPLETIONS, MESSAGES, RESPONSES, *_ = TABLES
# Each has the rows that its endpoints share, but for those of tables before it.
SECTIONS = (
    (CHAT, COMPLETIONS, MESSAGES, RESPONSES),
    (CHAT, MESSAGES, RESPONSES),
    (CHAT, RESPONSES),
    (CHAT, COMPLETIONS),
    *((name,) for name in TABLES if name.startswith("/v1") or "tokenize" in name),
    ("/api/chat", "/api/generate"),
    ("/api/chat",),
    ("/api/generate",),
    ("options of both",),
    ("/api/embed", "/api/embeddings"),
    ("/api/embed",),
    ("/api/embeddings",),
    ("/api/show",),
)
TITLES = {Rule.ACCEPTED: "", Rule.REFUSED: "**instead, or why**", Rule.IGNORED: "**why**"}
HEAD = """\
# Fields of requests

An endpoint has the rows of every table whose heading names it. [README.md](README.md) says how
fields are checked. `python -m tests.server.protocol.field_tables` writes this page.
"""
Row = tuple[Rule, str, str]


def rows_of(name: str) -> list[Row]:
    return [(field.rule, field.name, field.note) for field in TABLES[name]]


def section(endpoints: tuple[str, ...], rows: list[Row], above: set[Row]) -> str:
    """Return a heading and a table. Fields with one note are one line; rows that other endpoints'
    tables have already are only named."""
    lines = [f"## {', '.join(endpoints)}\n"]
    for rule in Rule:
        names = defaultdict(list)
        for row in (row for row in rows if row[0] is rule):
            names["as above" if row in above else row[2]].append(row[1])
        mark = "" if rule is Rule.ACCEPTED else "**"
        if names:
            lines.append(f"| {mark}{rule.value}{mark} | {TITLES[rule]} |")
        lines += ["|---|---|"] if rule is Rule.ACCEPTED else []
        lines += [f"| {', '.join(fields)} | {note} |" for note, fields in names.items()]
    return "\n".join(lines) + "\n"


def document() -> str:
    written: list[tuple[set[str], set[Row]]] = []
    sections = [HEAD]
    for endpoints in SECTIONS:
        covered = {row for names, had in written if names >= {*endpoints} for row in had}
        shared = [set(rows_of(name)) for name in endpoints]
        rows = [row for row in rows_of(endpoints[0]) if row in set.intersection(*shared) - covered]
        above = {row for _, had in written for row in had}
        if rows:
            sections.append(section(endpoints, rows, above))
        written.append(({*endpoints}, {*rows}))
    return "\n".join(sections)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
