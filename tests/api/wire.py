"""The APIs as their clients see them: what they send, and what they make of the answers.

Readers are strict. An answer that no vendor's SDK would type, or whose stream adds up to something
else than its end says, fails in whatever row it comes.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

import httpx2
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.text.conversation import Tool, ToolCall, Turn
from tests.server.harness import CHAT as CHAT_PATH
from tests.server.harness import COMPLETIONS as COMPLETIONS_PATH
from tests.server.harness import MODEL, Json, events

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HELLO = Turn("user", "Hello")
LENGTH = 300


@dataclass(frozen=True)
class Ask:
    """What a client wants. Each API has its own words for it."""

    turns: tuple[Turn, ...] = (HELLO,)
    tools: tuple[Tool, ...] = ()
    choice: str | None = None
    """none, required, or the name of the tool that must be called."""
    one_call: bool = False
    stop: tuple[str, ...] = ()
    length: int | None = LENGTH
    form: Any = None
    """A JSON schema."""
    thinks: bool | str | int | None = None
    """Whether, with which effort, or with how many tokens."""
    logprobs: int | None = None
    goes_on: bool = False
    """The last turn is the beginning of the answer."""


Call = tuple[str, Any]
"""A name, and its arguments: as text where they are no JSON."""


@dataclass
class Answer:
    """What a client has read. None and "" are what the API does not tell."""

    thoughts: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str = ""
    """stop, length, tool_calls."""
    prompt_tokens: int = 0
    tokens: int = 0
    thought_tokens: int | None = None
    logprobs: list[Json] = field(default_factory=list)
    parts: list[str] | None = None
    """The kinds of its parts, in their order."""
    stopped_by: str | None = None
    ids: list[str] = field(default_factory=list)
    """Of all that has one."""


@dataclass(frozen=True)
class Error:
    """Why there is no answer."""

    status: int
    kind: str
    message: str
    param: str | None
    """None where only the message names it."""

    def names(self, param: str | None) -> bool:
        if self.param is not None or param is None:
            return self.param == param
        return bool(re.search(rf"(?<![\w.\]]){re.escape(param)}(?![\w.\[])", self.message))


def read_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_named_events(text: str) -> list[Json]:
    """The data of events that are all named by their type; comments are skipped."""
    blocks = [one for one in text.removesuffix("\n\n").split("\n\n") if not one.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


class Api(ABC):
    """One of the APIs."""

    path: ClassVar[str]
    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[dict[str, str]] = {}
    """Fields by their names in other APIs; "" where there is none."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def write(self, ask: Ask) -> Json: ...

    @abstractmethod
    def read_whole(self, body: Json) -> Answer: ...

    @abstractmethod
    def read_stream(self, text: str) -> Answer: ...

    def with_stream(self, body: Json) -> Json:
        return body | {"stream": True}

    def read_late_error(self, text: str) -> Json:
        """The last event of a stream, which is an error, and nothing after it."""
        *_, last, end = text.split("\n\n")
        assert end == ""
        assert "[DONE]" not in text
        body: Json = json.loads(last.partition("data: ")[2])
        return body

    def read_error(self, response: httpx2.Response) -> Error:
        (error,) = response.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return Error(response.status_code, error["type"], error["message"], error["param"])


# --- OpenAI's ------------------------------------------------------------------------------------


def write_tool(tool: Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def write_thinking(thinks: bool | str | int | None) -> Json:
    match thinks:
        case None:
            return {}
        case bool():
            return {"enable_thinking": thinks}
        case str():
            return {"reasoning_effort": thinks}
    return {"thinking_token_budget": thinks}


def write_choice(choice: str | None, named: Json) -> Json:
    if choice is None:
        return {}
    return {"tool_choice": choice if choice in ("none", "required") else named}


def read_usage(usage: Json) -> Json:
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == sum(counts)
    details = usage["completion_tokens_details"]
    return {
        "prompt_tokens": counts[0],
        "tokens": counts[1],
        "thought_tokens": details["reasoning_tokens"],
    }


class OpenAI(Api):
    """What both older APIs of OpenAI's share."""

    def with_stream(self, body: Json) -> Json:
        return {"stream_options": {"include_usage": True}} | super().with_stream(body)

    @staticmethod
    def split_usage(text: str, kind: str) -> tuple[list[Json], Json]:
        """The choice of each chunk, and the usage, which comes last."""
        *chunks, last = events(text)
        assert last["choices"] == []
        assert {chunk["usage"] for chunk in chunks} == {None}
        heads = {(c["id"], c["created"], c["model"], c["object"]) for c in (*chunks, last)}
        ((_, _, model, named),) = heads
        assert (model, named) == (MODEL, kind)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [choice["index"] for choice in choices] == [0] * len(chunks)
        assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}
        return choices, last["usage"]


class Chat(OpenAI):
    """Chat completions."""

    path = CHAT_PATH

    def write(self, ask: Ask) -> Json:
        body: Json = {"messages": list(map(self.write_message, ask.turns)), "temperature": 0}
        body |= {} if ask.length is None else {"max_tokens": ask.length}
        body |= {"tools": [write_tool(tool) for tool in ask.tools]} if ask.tools else {}
        body |= write_choice(ask.choice, {"type": "function", "function": {"name": ask.choice}})
        body |= {"parallel_tool_calls": False} if ask.one_call else {}
        body |= {"stop": list(ask.stop)} if ask.stop else {}
        if ask.form is not None:
            form = {"name": "form", "schema": ask.form, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if ask.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": ask.logprobs}
        body |= {"continue_final_message": True} if ask.goes_on else {}
        return body | write_thinking(ask.thinks)

    @staticmethod
    def write_message(turn: Turn) -> Json:
        message: Json = {"role": turn.role, "content": turn.text}
        message |= {"reasoning": turn.reasoning} if turn.reasoning else {}
        if turn.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in turn.tool_calls
            ]
        return message | ({"tool_call_id": turn.tool_call_id} if turn.tool_call_id else {})

    def read_whole(self, body: Json) -> Answer:
        ChatCompletion.model_validate(body)
        assert (body["object"], body["model"]) == ("chat.completion", MODEL)
        (choice,) = body["choices"]
        message = choice["message"]
        assert (message["content"] is None) <= bool(message.get("tool_calls"))
        assert message["content"] != "" or not message.get("tool_calls")
        return self._answer(message, choice["logprobs"], choice["finish_reason"], body)

    def read_stream(self, text: str) -> Answer:
        for chunk in events(text):
            ChatCompletionChunk.model_validate(chunk)
        choices, usage = self.split_usage(text, "chat.completion.chunk")
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        message: Json = {"tool_calls": []}
        logprobs: list[Json] = []
        for choice in choices:
            delta = choice["delta"]
            for name in delta.keys() - {"role", "tool_calls"}:
                message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                self._add(message["tool_calls"], call)
            logprobs += (choice["logprobs"] or {"content": []})["content"]
        head: Json = {"id": events(text)[0]["id"], "usage": usage}
        return self._answer(message, {"content": logprobs}, choices[-1]["finish_reason"], head)

    @staticmethod
    def _add(calls: list[Json], piece: Json) -> None:
        """A call names itself first, and its arguments follow."""
        if piece["index"] == len(calls):
            assert piece.keys() == {"index", "id", "type", "function"}
            assert piece["function"].keys() == {"name", "arguments"}
            calls.append({key: piece[key] for key in ("id", "type")} | {"function": {}})
            calls[-1]["function"] |= piece["function"]
        else:
            assert piece.keys() == {"index", "function"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]

    @staticmethod
    def _answer(message: Json, logprobs: Json | None, finish: str, head: Json) -> Answer:
        assert message.get("reasoning") == message.get("reasoning_content"), "under both names"
        calls = message.get("tool_calls", [])
        assert all(call["type"] == "function" for call in calls)
        assert head["id"].startswith("chatcmpl-")
        return Answer(
            thoughts=message.get("reasoning", ""),
            text=message["content"] or "",
            calls=[
                (call["function"]["name"], read_arguments(call["function"]["arguments"]))
                for call in calls
            ],
            finish=finish,
            logprobs=logprobs["content"] if logprobs else [],
            ids=[head["id"], *(call["id"] for call in calls)],
            **read_usage(head["usage"]),
        )


class Completions(OpenAI):
    """Texts that are gone on with: of a conversation, the last turn."""

    path = COMPLETIONS_PATH

    def write(self, ask: Ask) -> Json:
        body: Json = {"prompt": ask.turns[-1].text, "temperature": 0}
        body |= {} if ask.length is None else {"max_tokens": ask.length}
        body |= {"stop": list(ask.stop)} if ask.stop else {}
        return body | ({} if ask.logprobs is None else {"logprobs": ask.logprobs})

    def read_whole(self, body: Json) -> Answer:
        Completion.model_validate(body)
        assert (body["object"], body["model"]) == ("text_completion", MODEL)
        return self._answer(body["choices"], body["usage"])

    def read_stream(self, text: str) -> Answer:
        return self._answer(*self.split_usage(text, "text_completion"))

    @staticmethod
    def _answer(choices: list[Json], usage: Json) -> Answer:
        lists: Json = {}
        for choice in choices:
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values)
        text = "".join(choice["text"] for choice in choices)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        rows = list(zip(*(lists[name] for name in names), strict=True)) if lists else []
        for token, logprob, top, offset in rows:
            assert top[token] == logprob < 0
            assert offset <= len(text)
        return Answer(
            text=text,
            finish=choices[-1]["finish_reason"],
            logprobs=[
                {"token": token, "logprob": logprob, "top_logprobs": list(top)}
                for token, logprob, top, _ in rows
            ],
            **read_usage(usage),
        )


class Responses(Api):
    """Responses."""

    path = "/v1/responses"
    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "",
    }

    def write(self, ask: Ask) -> Json:
        items = [item for turn in ask.turns for item in self.write_items(turn)]
        body: Json = {"input": items, "temperature": 0}
        body |= {} if ask.length is None else {"max_output_tokens": ask.length}
        body |= {"tools": list(map(self.write_tool, ask.tools))} if ask.tools else {}
        body |= write_choice(ask.choice, {"type": "function", "name": ask.choice})
        body |= {"parallel_tool_calls": False} if ask.one_call else {}
        body |= {"stop": list(ask.stop)} if ask.stop else {}
        if ask.form is not None:
            form = {"type": "json_schema", "name": "form", "schema": ask.form, "strict": True}
            body["text"] = {"format": form}
        if ask.logprobs is not None:
            body["include"] = ["message.output_text.logprobs"]
            body["top_logprobs"] = ask.logprobs
        if isinstance(ask.thinks, str):
            return body | {"reasoning": {"effort": ask.thinks}}
        body |= {"continue_final_message": True} if ask.goes_on else {}
        return body | write_thinking(ask.thinks)

    @staticmethod
    def write_tool(tool: Tool) -> Json:
        return {"type": "function", **write_tool(tool)["function"]}

    @staticmethod
    def write_items(turn: Turn) -> Iterable[Json]:
        if turn.role == "tool":
            yield {
                "type": "function_call_output",
                "call_id": turn.tool_call_id,
                "output": turn.text,
            }
            return
        if turn.reasoning:
            content = [{"type": "reasoning_text", "text": turn.reasoning}]
            yield {"type": "reasoning", "summary": [], "content": content}
        if turn.text or not (turn.reasoning or turn.tool_calls):
            yield {"role": turn.role, "content": turn.text}
        for call in turn.tool_calls:
            yield {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }

    def read_whole(self, body: Json) -> Answer:
        assert Response.model_validate(body).to_dict() == body
        assert (body["object"], body["model"], body["error"]) == ("response", MODEL, None)
        assert body["id"].startswith("resp_")
        cut = body["status"] == "incomplete"
        assert cut or body["status"] == "completed"
        assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
        assert (body["completed_at"] is None) == cut
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        answer = Answer(
            prompt_tokens=usage["input_tokens"],
            tokens=usage["output_tokens"],
            thought_tokens=usage["output_tokens_details"]["reasoning_tokens"],
            parts=[],
            ids=[body["id"]],
        )
        called = False
        for item in body["output"]:
            self._add(answer, item)
            called |= "call" in item["type"] and item["status"] == "completed"
        answer.finish = "length" if cut else "tool_calls" if called else "stop"
        return answer

    @staticmethod
    def _add(answer: Answer, item: Json) -> None:
        kind, ends = item["type"], item["status"]
        assert answer.parts is not None
        answer.parts.append(kind if ends == "completed" else f"{kind}, {ends}")
        answer.ids.append(item["id"])
        if kind == "reasoning":
            assert item["summary"] == []
            answer.thoughts += "".join(part["text"] for part in item["content"])
        elif kind == "message":
            (part,) = item["content"]
            answer.text += part["text"]
            answer.logprobs += part["logprobs"]
        elif kind == "tool_search_call":
            answer.calls.append((kind, item["arguments"]))
        else:
            name = ".".join(filter(None, (item.get("namespace"), item["name"])))
            answer.calls.append((name, read_arguments(item["arguments"])))
            answer.ids.append(item["call_id"])

    def read_stream(self, text: str) -> Answer:
        stream = read_named_events(text)
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        for event in stream:
            assert RESPONSE_EVENT.validate_python(event).to_dict() == event
        created, begun, *between, last = stream
        for event in (created, begun):
            response = event["response"]
            assert (response["status"], response["output"]) == ("in_progress", [])
        assert [created["type"], begun["type"]] == ["response.created", "response.in_progress"]
        assert last["type"] == f"response.{last['response']['status']}"
        self._rebuild(between, last["response"]["output"])
        return self.read_whole(last["response"])

    @staticmethod
    def _rebuild(stream: list[Json], output: list[Json]) -> None:
        """Every item comes to what the response says it is, piece by piece, with its id."""
        texts: list[str] = []
        logprobs: list[list[Json]] = []
        done: list[Json] = []
        for event in stream:
            item, kind = output[event["output_index"]], event["type"].removeprefix("response.")
            assert (event["item"]["id"] if "item" in event else event["item_id"]) == item["id"]
            match kind:
                case "output_item.added":
                    assert event["output_index"] == len(texts) == len(done)
                    assert event["item"]["status"] == "in_progress"
                    assert event["item"].get("content", []) == []
                    texts.append("")
                    logprobs.append([])
                case "content_part.added":
                    assert event["part"]["text"] == ""
                case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                    texts[-1] += event["delta"]
                    logprobs[-1] += event.get("logprobs", [])
                case "output_text.done" | "reasoning_text.done":
                    assert event["text"] == texts[-1]
                    assert event.get("logprobs", []) == logprobs[-1]
                case "function_call_arguments.done":
                    assert (event["name"], event["arguments"]) == (item["name"], texts[-1])
                case "content_part.done":
                    assert [event["part"]] == item["content"]
                case "output_item.done":
                    done.append(event["item"])
                    parts = item.get("content", [{"text": item.get("arguments")}])
                    assert [part["text"] for part in parts] == [texts[-1]] or "query" in str(item)
        assert done == output

    def read_late_error(self, text: str) -> Json:
        event = super().read_late_error(text)
        assert event["type"] == "response.failed"
        assert RESPONSE_EVENT.validate_python(event).to_dict() == event
        assert event["response"]["status"] == "failed"
        error: Json = event["response"]["error"]
        return {"error": {"type": error["code"], "message": error["message"]}}


# --- Anthropic's ---------------------------------------------------------------------------------

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


# --- Ollama's ------------------------------------------------------------------------------------

DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
OPTIONS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class OllamaChat(Api):
    """Ollama's chat."""

    path = "/api/chat"
    media_type = "application/x-ndjson"
    names: ClassVar[dict[str, str]] = {
        **{name: f"options.{name}" for name in (*OPTIONS, "seed", "stop")},
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        "n": "",
    }
    part: ClassVar[str] = "message"

    def write(self, ask: Ask) -> Json:
        assert (ask.choice, ask.one_call) == (None, False), "Ollama has no choice of tools"
        options: Json = {"temperature": 0}
        options |= {} if ask.length is None else {"num_predict": ask.length}
        options |= {"stop": list(ask.stop)} if ask.stop else {}
        body: Json = {"options": options} | self.write_prompt(ask.turns)
        body |= {"tools": [write_tool(tool) for tool in ask.tools]} if ask.tools else {}
        body |= {} if ask.form is None else {"format": ask.form}
        body |= {} if ask.thinks is None else {"think": ask.thinks}
        if ask.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": ask.logprobs}
        return body | {"stream": False}

    def write_prompt(self, turns: tuple[Turn, ...]) -> Json:
        return {"messages": list(map(self.write_message, turns))}

    @staticmethod
    def write_message(turn: Turn) -> Json:
        message: Json = {"role": turn.role, "content": turn.text}
        message |= {"thinking": turn.reasoning} if turn.reasoning else {}
        if turn.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in turn.tool_calls
            ]
        return message

    def read_whole(self, body: Json) -> Answer:
        keys = {"model", "created_at", self.part, "done", "done_reason", *DURATIONS}
        keys |= {"prompt_eval_count", "eval_count", "logprobs", "thinking"}
        assert keys - {"logprobs", "thinking"} <= body.keys() <= keys
        assert (body["model"], body["done"], body["load_duration"]) == (MODEL, True, 0)
        assert body["done_reason"] in ("stop", "length")
        assert datetime.fromisoformat(body["created_at"]).tzinfo is not None
        spent = body["prompt_eval_duration"] + body["eval_duration"]
        assert 0 < spent <= body["total_duration"]
        answer = Answer(
            finish=body["done_reason"],
            prompt_tokens=body["prompt_eval_count"],
            tokens=body["eval_count"],
            logprobs=body.get("logprobs", []),
        )
        self._read_part(answer, body)
        return answer

    def _read_part(self, answer: Answer, body: Json) -> None:
        message = body["message"]
        assert message.keys() - {"thinking", "tool_calls"} == {"role", "content"}
        answer.text, answer.thoughts = message["content"], message.get("thinking", "")
        for number, call in enumerate(message.get("tool_calls", ())):
            assert call["function"]["index"] == number
            answer.calls.append((call["function"]["name"], call["function"]["arguments"]))
            answer.ids.append(call["id"])
            answer.finish = "length" if answer.finish == "length" else "tool_calls"

    def read_stream(self, text: str) -> Answer:
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert {line["model"] for line in lines} == {MODEL}
        whole = dict(lines[-1])
        logprobs: list[Json] = []
        for line in lines[:-1]:
            self._add(whole, line)
            logprobs += line.get("logprobs", [])
        return self.read_whole(whole | ({"logprobs": logprobs} if logprobs else {}))

    @staticmethod
    def _add(whole: Json, line: Json) -> None:
        message = whole["message"]
        for name, value in line["message"].items():
            if name == "role":
                continue
            message[name] = message.get(name, type(value)()) + value

    def read_late_error(self, text: str) -> Json:
        body: Json = json.loads(text.splitlines()[-1])
        assert body.keys() == {"error"}
        return {"error": {"type": "", "message": body["error"]}}

    def read_error(self, response: httpx2.Response) -> Error:
        body = response.json()
        assert body.keys() == {"error"}
        return Error(response.status_code, "", body["error"], None)


class OllamaGenerate(OllamaChat):
    """Ollama's texts: a system prompt and a question."""

    path = "/api/generate"
    part = "response"

    def write_prompt(self, turns: tuple[Turn, ...]) -> Json:
        *system, question = turns
        return {"prompt": question.text} | ({"system": system[0].text} if system else {})

    def _read_part(self, answer: Answer, body: Json) -> None:
        assert "message" not in body
        answer.text, answer.thoughts = body["response"], body.get("thinking", "")

    @staticmethod
    def _add(whole: Json, line: Json) -> None:
        for name in line.keys() & {"response", "thinking"}:
            whole[name] = whole.get(name, "") + line[name]


CHAT, COMPLETIONS, RESPONSES = Chat(), Completions(), Responses()
MESSAGES, OLLAMA, GENERATE = Messages(), OllamaChat(), OllamaGenerate()
FOUR: tuple[Api, ...] = (CHAT, RESPONSES, MESSAGES, OLLAMA)
ALL: tuple[Api, ...] = (*FOUR, COMPLETIONS, GENERATE)
OPENAIS: tuple[Api, ...] = (CHAT, RESPONSES)


def make_call(name: str, call_id: str = "call_1", **arguments: Any) -> ToolCall:
    """A call in an earlier turn."""
    return ToolCall(call_id, name, json.dumps(arguments, ensure_ascii=False))
