"""Render chat templates as transformers does (utils/chat_template_utils.py), because their authors
write them for transformers. transformers itself takes a second to import."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]


class Generation(Extension):
    """This jinja2 extension parses transformers' tag ``generation`` around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """The template's ``dict``. The class itself would offer more attributes to a template."""

    def __call__(self, *arguments: Any, **members: Any) -> dict[Any, Any]:
        return dict(*arguments, **members)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """The template's ``namespace``. It refuses names with a leading underscore."""

    def __init__(*arguments: Any, **members: Any) -> None:  # noqa: N805 - a member may be "self"
        self, *others = arguments
        members = dict(*others, **members)
        for name in members:
            _check_name(name)
        Namespace.__init__(self, members)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no member {name!r}: it begins with an underscore")


def _raise(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; jinja2's own filter would escape characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def render_template(text: str, messages: Sequence[Message], /, **arguments: Any) -> str:
    """Render a template. Raises ValueError if there are no messages, or the template's error."""
    if not messages:
        raise ValueError("there are no messages")
    # Templates for gpt-oss read an assistant's reasoning under another name.
    named = [
        {"thinking": message["reasoning_content"], **message}
        if "reasoning_content" in message
        else message
        for message in messages
    ]
    given = {"tools": None, "documents": None, "add_generation_prompt": False} | arguments
    return _compiled(text).render(messages=named, **given)
