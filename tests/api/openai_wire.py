"""OpenAI's APIs: chat completions, completions and responses."""

from collections.abc import Iterable
from typing import Any, ClassVar

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from server.text.conversation import Tool, Turn
from tests.api.wire import Answer, Api, Ask, read_arguments, read_named_events, write_tool
from tests.server.harness import CHAT as CHAT_PATH
from tests.server.harness import COMPLETIONS as COMPLETIONS_PATH
from tests.server.harness import MODEL, Json, events

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


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
