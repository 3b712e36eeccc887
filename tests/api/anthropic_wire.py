"""Anthropic's messages."""

import json
from typing import Any, ClassVar

import httpx2
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from server.text.conversation import Tool, Turn
from tests.api.wire import LENGTH, Answer, Api, Ask, Error, read_named_events
from tests.server.harness import MODEL, Json

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


class Messages(Api):
    """Anthropic's messages."""

    path = "/v1/messages"
    names: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "logprobs": "", "n": ""}

    def write(self, ask: Ask) -> Json:
        first, *others = ask.turns
        is_system = first.role == "system" and len(others) > 0
        turns = others if is_system else ask.turns
        body: Json = {"messages": list(map(self.write_message, turns)), "temperature": 0}
        body |= {"system": first.text} if is_system else {}
        body |= {"max_tokens": LENGTH if ask.length is None else ask.length}
        body |= {"tools": list(map(self.write_tool, ask.tools))} if ask.tools else {}
        kind = {None: "auto", "none": "none", "required": "any"}.get(ask.choice, "tool")
        choice: Json = {"type": kind} | ({"name": ask.choice} if kind == "tool" else {})
        choice |= {"disable_parallel_tool_use": True} if ask.one_call else {}
        body |= {"tool_choice": choice} if ask.choice or ask.one_call else {}
        body |= {"stop_sequences": list(ask.stop)} if ask.stop else {}
        config: Json = {}
        if ask.form is not None:
            config["format"] = {"type": "json_schema", "schema": ask.form}
        match ask.thinks:
            case bool():
                body["thinking"] = {"type": "enabled" if ask.thinks else "disabled"}
            case str():
                config["effort"] = ask.thinks
            case int():
                body["thinking"] = {"type": "enabled", "budget_tokens": ask.thinks}
        return body | ({"output_config": config} if config else {})

    @staticmethod
    def write_tool(tool: Tool) -> Json:
        wire = {"name": tool.name, "input_schema": tool.parameters, "strict": tool.strict}
        return wire | ({"description": tool.description} if tool.description else {})

    @staticmethod
    def write_message(turn: Turn) -> Json:
        if turn.role == "tool":
            result = {"type": "tool_result", "tool_use_id": turn.tool_call_id}
            return {"role": "user", "content": [result | {"content": turn.text}]}
        if not (turn.reasoning or turn.tool_calls):
            return {"role": turn.role, "content": turn.text}
        blocks: list[Json] = []
        if turn.reasoning:
            blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": "quire"})
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        blocks += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": json.loads(call.arguments),
            }
            for call in turn.tool_calls
        ]
        return {"role": turn.role, "content": blocks}

    def read_whole(self, body: Json) -> Answer:
        AnthropicMessage.model_validate(body)
        assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
        assert body["id"].startswith("msg_")
        usage: Json = body["usage"]
        reason: str = body["stop_reason"]
        assert (reason == "stop_sequence") == (body["stop_sequence"] is not None)
        counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        answer = Answer(
            finish=FINISHES.get(reason, reason),
            prompt_tokens=sum(usage[name] for name in counts),
            tokens=usage["output_tokens"],
            thought_tokens=usage["output_tokens_details"]["thinking_tokens"],
            parts=[block["type"] for block in body["content"]],
            stopped_by=body["stop_sequence"] or "",
            ids=[body["id"]],
        )
        for block in body["content"]:
            self._add(answer, block)
        return answer

    @staticmethod
    def _add(answer: Answer, block: Json) -> None:
        kind = block["type"]
        if kind == "thinking":
            assert block.keys() == {"type", "thinking", "signature"}
            assert block["signature"] == "quire", "clients drop thoughts without a signature"
            answer.thoughts += block["thinking"]
        elif kind == "text":
            assert block.keys() == {"type", "text"}
            answer.text += block["text"]
        else:
            assert block.keys() == {"type", "id", "name", "input"}
            answer.calls.append((block["name"], block["input"]))
            answer.ids.append(block["id"])

    def read_stream(self, text: str) -> Answer:
        return self.read_whole(self.add_up(read_named_events(text)))

    @staticmethod
    def add_up(stream: list[Json]) -> Json:
        """The message that a client makes of its events."""
        start, ping, *stream = stream
        assert (start["type"], ping) == ("message_start", {"type": "ping"})
        for event in (start, *stream):
            MESSAGE_EVENT.validate_python(event)
        assert start["message"]["content"] == []
        assert start["message"]["stop_reason"] is None
        *blocks, last, stop = stream
        assert (last["type"], stop["type"]) == ("message_delta", "message_stop")
        message: Json = start["message"] | last["delta"] | {"usage": last["usage"]}
        content: list[Json] = message["content"]
        written, is_open = "", False
        for event in blocks:
            match event["type"]:
                case "content_block_start":
                    assert (event["index"], is_open) == (len(content), False)
                    content.append(dict(event["content_block"]))
                    written, is_open = "", True
                case "content_block_stop":
                    is_open = False
                    if content[-1]["type"] == "tool_use":
                        content[-1]["input"] = json.loads(written)
                case kind:
                    assert (kind, is_open) == ("content_block_delta", True)
                    assert event["index"] == len(content) - 1
                    delta = event["delta"]
                    written += delta.get("partial_json", "")
                    for name in delta.keys() & {"text", "thinking", "signature"}:
                        content[-1][name] += delta[name]
        assert not is_open
        return message

    def read_late_error(self, text: str) -> Json:
        event = super().read_late_error(text)
        assert event["type"] == "error"
        assert event["request_id"].startswith("req_")
        return event

    def read_error(self, response: httpx2.Response) -> Error:
        body = response.json()
        assert body.keys() == {"type", "error", "request_id"}
        assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
        assert body["request_id"] == response.headers["request-id"]
        error = body["error"]
        return Error(response.status_code, error["type"], error["message"], None)
