"""Write server/protocol/FIELDS.md: ``python -m tests.server.protocol.field_tables``."""

from collections import defaultdict
from pathlib import Path

from server.protocol.chat.request import ChatRequest
from server.protocol.common import SamplingFields
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import Rule
from server.protocol.messages.request import MessagesRequest
from server.protocol.ollama.options import Options
from server.protocol.ollama.request import (
    KeptFields,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from server.protocol.responses.request import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

DOCUMENT = Path(__file__).parents[3] / "server" / "protocol" / "FIELDS.md"
Body = (
    type[SamplingFields]
    | type[EmbeddingRequest]
    | type[TokenizeRequest]
    | type[DetokenizeRequest]
    | type[KeptFields]
    | type[ShowRequest]
    | type[Options]
)
ENDPOINTS: dict[str, Body] = {
    (CHAT := "/v1/chat/completions"): ChatRequest,
    (COMPLETIONS := "/v1/completions"): CompletionRequest,
    (MESSAGES := "/v1/messages"): MessagesRequest,
    (RESPONSES := "/v1/responses"): ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "options of both": Options,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": ShowRequest,
}
# Each has the rows that its endpoints share, but for those of tables before it.
SECTIONS = (
    (CHAT, COMPLETIONS, MESSAGES, RESPONSES),
    (CHAT, MESSAGES, RESPONSES),
    (CHAT, RESPONSES),
    (CHAT, COMPLETIONS),
    *((name,) for name in ENDPOINTS if not name.startswith(("/api", "options"))),
    ("/api/chat", "/api/generate"),
    *((name,) for name in ("/api/chat", "/api/generate", "options of both")),
    ("/api/embed", "/api/embeddings"),
    *((name,) for name in ("/api/embed", "/api/embeddings", "/api/show")),
)
HEAD = """\
# Fields of requests

An endpoint has the rows of every table whose heading names it. [README.md](README.md) says how
fields are checked. `python -m tests.server.protocol.field_tables` writes this page.
"""
Row = tuple[Rule, str, str]


def rows_of(name: str) -> list[Row]:
    rules = ENDPOINTS[name].rules
    return [(it.rule, it.name, it.note if it.rule is not Rule.IGNORED else "") for it in rules]


def section(endpoints: tuple[str, ...], rows: list[Row], above: set[Row]) -> str:
    """Return a heading and a table. above: rows that other endpoints' tables have already."""
    lines = [f"## {', '.join(endpoints)}\n", "field | accepted, or what to do instead", "---|---"]
    for rule in Rule:
        names = defaultdict(list)
        for row in (row for row in rows if row[0] is rule):
            names["as above" if row in above and row[2] else row[2]].append(row[1])
        if rule is Rule.REFUSED and names:
            lines.append("**refused** |")
        lines += [
            f"{', '.join(fields)} | {note}" if note else f"**ignored** | {', '.join(fields)}"
            for note, fields in names.items()
        ]
    return "\n".join(lines) + "\n"


def document() -> str:
    written: list[tuple[set[str], set[Row]]] = []
    sections = [HEAD]
    for endpoints in SECTIONS:
        covered = {row for names, had in written if names >= {*endpoints} for row in had}
        shared = set.intersection(*({*rows_of(name)} for name in endpoints)) - covered
        rows = [row for row in rows_of(endpoints[0]) if row in shared]
        if rows:
            sections.append(section(endpoints, rows, {row for _, had in written for row in had}))
        written.append(({*endpoints}, shared))
    return "\n".join(sections)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
