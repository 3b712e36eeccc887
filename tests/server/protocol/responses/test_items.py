"""How items are kept; tests/api has how they are read."""

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from server.protocol.responses.items import Input, Item, packed_reasoning, read_input, turns
from server.protocol.unsupported import Unsupported
from server.text.conversation import Turn

INPUT: TypeAdapter[Any] = TypeAdapter(Input)
SDK: TypeAdapter[Any] = TypeAdapter(ResponseItem)
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'}
HEARD = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
TOOLS = [{"type": "function", "name": "look"}, {"type": "custom"}]


def read(item: Any) -> tuple[Item, tuple[Turn, ...]]:
    notes = Unsupported("placeholder", "images.responses", "responses")
    ((place, read),) = read_input(INPUT.validate_json(json.dumps([item])), lambda _: None, notes)
    return read, turns([(place, read)], notes)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hello"},
        {"role": "user"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "msg_1"},
        {"role": "assistant", "content": "Once", "prefix": True},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "reasoning", "encrypted_content": packed_reasoning("Hm."), "prefix": True},
        CALL,
        CALL | {"arguments": {"at": 1}, "namespace": "crm"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": "*** é"},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        HEARD,
        HEARD | {"output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "function_call_output"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        HEARD | {"output": [{"type": "input_file", "file_data": "x", "filename": "a.pdf"}]},
        {"type": "tool_search_output", "call_id": "c", "tools": TOOLS},
        {"type": "additional_tools", "tools": TOOLS},
    ],
)
def test_what_is_kept_says_the_same_and_is_complete(item: Any) -> None:
    first, heard = read(item)
    kept = first.stored_form("1f")
    assert kept["id"] == item.get("id") or kept["id"].endswith("_1f")
    again, heard_again = read(kept)
    assert heard_again == heard
    assert again.stored_form("2f") == kept
    if "tools" not in item:
        assert SDK.validate_python(kept).to_dict() == kept
