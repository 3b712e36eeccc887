"""Templates are rendered, and refused, as transformers does it."""

from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.text.template_sandbox import render_template
from tests.models import TEMPLATE, XML_TEMPLATE
from tests.templates import LLAMA_TEMPLATE

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"a": "<é & ü>"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"b": [1, None]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>Hi</b> & 'é'"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "1"},
]
RENDERED = [
    TEMPLATE,
    XML_TEMPLATE,
    LLAMA_TEMPLATE,
    "{% if true %}\n  a\n{% endif %}\n  {%- set x = 1 %}\n{{ x }}{{ missing }}{{ tools is none }}",
    "{{ tools | tojson }} {{ messages | tojson(indent=2, sort_keys=true) }}",
    "{{ messages[1].content | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{{ messages[2].thinking }}{{ messages[1].thinking is defined }}{{ documents is none }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% set ns = namespace(self=1, b=2) %}{% set ns.b = ns.b + ns.self %}{{ ns.b }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['a']) }}{{ strftime_now('%%') }}{{ eos_token }}",
    "{{ enable_thinking is defined }}{{ add_generation_prompt }}{{ '<' | e }}{{ '&' ~ '<' }}",
]
REFUSED = [
    "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}",
    "{{ tools[0].update(a=1) }}",
    "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ namespace(__init__=1) }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ strftime_now.__globals__.x }}",
    "{{ 'a'.format_map({}).x.y }}",
    "{% if %}",
    "{% generation %}",
    "{% include 'x' %}",
    "{{ missing.x }}",
    "{{ range(99999999) | list }}",
]
GIVEN = {"tools": [TOOL], "add_generation_prompt": True, "eos_token": "</s>"}


@pytest.mark.parametrize("arguments", [{}, GIVEN, {"enable_thinking": False}])
@pytest.mark.parametrize("template", RENDERED)
def test_a_template_is_rendered_as_transformers_does(
    template: str, arguments: dict[str, Any]
) -> None:
    for messages in (MESSAGES, MESSAGES[1:2]):
        try:
            theirs = render_jinja_template([messages], chat_template=template, **arguments)[0]
        except jinja2.UndefinedError:  # the third message, of a conversation of one
            with pytest.raises(jinja2.UndefinedError):
                render_template(template, messages, **arguments)
        else:
            assert [render_template(template, messages, **arguments)] == theirs


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_is_refused_as_transformers_does(template: str) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        render_jinja_template([MESSAGES], chat_template=template, **GIVEN)
    with pytest.raises(theirs.type):
        render_template(template, MESSAGES, **GIVEN)


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="no messages"):
        render_template(TEMPLATE, [])
