"""Ollama's chat and texts."""

import json
from datetime import datetime
from typing import ClassVar

import httpx2

from server.text.conversation import Turn
from tests.api.wire import Answer, Api, Ask, Error, write_tool
from tests.server.harness import MODEL, Json

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
