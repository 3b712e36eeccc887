import pytest

from server.text.calls.tool_format import ToolFormat, tool_format


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n{}\n</tool_call>", ToolFormat.HERMES),
        ("<tool_call>\n<function=f>\n", ToolFormat.XML),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of '
            "argument name and its value}.",
            ToolFormat.LLAMA,
        ),
        (r'{{- "Write {\"name\": the name, \"parameters\": {}}" }}', ToolFormat.LLAMA),
        ('{"name": "f", "description": "d", "parameters": {}}', None),
        ('{"name": "f"} and {"parameters": {}}', None),
        ('<tool_call>{"name": "f", "parameters": {}}', ToolFormat.HERMES),
        ("{{ messages }}", None),
        ("<function=f>", None),
    ],
)
def test_a_template_tells_how_its_model_writes_calls(
    template: str, form: ToolFormat | None
) -> None:
    assert tool_format(template) is form
