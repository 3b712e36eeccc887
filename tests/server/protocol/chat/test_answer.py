from typing import Any

from server.protocol.answers import usage_object
from server.text.pieces import Delta, ToolCallArguments
from tests.server.protocol.finished import USAGE, chat_answer, deltas_of, report
from tests.server.text.calling import call, said, thought


def test_every_choice_of_a_chat_begins_with_who_speaks() -> None:
    first = chat_answer(choices=3).first_chunks()
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
    assert deltas_of(first) == [{"role": "assistant", "content": ""}] * 3


def test_a_whole_chat_keeps_its_choices_apart() -> None:
    answer = chat_answer(choices=2)
    answer.add(Delta([said("A")], [report(0, -0.5)], index=1))
    answer.add(Delta([thought("b")], finish="length", index=0))
    answer.add(Delta([said("c")], [report(3, -0.25)], finish="stop", index=1))
    first, second = answer.whole(USAGE)["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["message"]["content"], first["message"]["reasoning"]) == ("", "b")
    assert second["message"]["content"] == "Ac"
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "stop")
    assert first["logprobs"] is None
    assert [entry["token"] for entry in second["logprobs"]["content"]] == ["a", "bc"]


def test_a_chat_begins_with_who_speaks_and_ends_with_why_it_ended() -> None:
    answer = chat_answer()
    assert deltas_of(answer.first_chunks()) == [{"role": "assistant", "content": ""}]
    chunks = answer.chunks(Delta([said("a")], finish="length"))
    assert deltas_of(chunks) == [{"content": "a"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]


def test_thoughts_go_out_under_both_names() -> None:
    chunks = chat_answer().chunks(Delta([thought("Hm."), said("Yes.")]))
    assert deltas_of(chunks) == [
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "Yes."},
    ]


def test_a_whole_chat_gathers_its_deltas() -> None:
    answer = chat_answer()
    answer.add(Delta([thought("Hm")]))
    answer.add(Delta([thought("."), said("Ye")], [report(0, -0.5)]))
    answer.add(Delta([said("s.")], [report(3, -0.25)], finish="stop"))
    whole = answer.whole(USAGE)
    assert whole["object"] == "chat.completion"
    assert whole["usage"] == usage_object(USAGE, False)
    (choice,) = whole["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "bc"]


def test_a_whole_chat_without_thoughts_or_logprobs_does_not_mention_them() -> None:
    answer = chat_answer()
    answer.add(Delta([said("Yes.")], finish="stop"))
    (choice,) = answer.whole(USAGE)["choices"]
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert choice["logprobs"] is None


def test_log_probabilities_of_a_chat_name_tokens_by_text_and_bytes() -> None:
    delta = Delta([said("é")], [report(1, -1.0, (0, -0.5), (1, -1.0)), report(2, -2.0)])
    (chunk,) = chat_answer().chunks(delta)
    first, second = chunk["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "\N{REPLACEMENT CHARACTER}",
        "bytes": [0xC3],
        "logprob": -1.0,
        "top_logprobs": [
            {"token": "a", "bytes": [97], "logprob": -0.5},
            {"token": "\N{REPLACEMENT CHARACTER}", "bytes": [0xC3], "logprob": -1.0},
        ],
    }
    assert second["top_logprobs"] == []
    assert bytes(first["bytes"] + second["bytes"]).decode() == "é"


def test_log_probabilities_of_a_delta_are_sent_once() -> None:
    delta = Delta([thought("b"), said("c")], [report(3, -1.0)])
    logprobs = [c["choices"][0]["logprobs"] for c in chat_answer().chunks(delta)]
    assert logprobs[0] is not None
    assert logprobs[1:] == [None]


def test_log_probabilities_of_a_token_without_text_are_sent_all_the_same() -> None:
    (chunk,) = chat_answer().chunks(Delta([], [report(1, -1.0)]))
    assert chunk["choices"][0]["delta"] == {}
    assert len(chunk["choices"][0]["logprobs"]["content"]) == 1


def calls_of(whole: dict[str, Any]) -> Any:
    (choice,) = whole["choices"]
    return choice["message"].get("tool_calls")


def test_a_call_names_itself_first_and_its_arguments_follow() -> None:
    pieces = [*call(0, "look", '{"at": '), *call(1, "wait", "{}")]
    chunks = chat_answer().chunks(Delta(pieces, finish="tool_calls"))
    start = {"index": 0, "id": "call_0", "type": "function"}
    assert deltas_of(chunks)[:2] == [
        {"tool_calls": [{**start, "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": '}}]},
    ]
    assert [d["tool_calls"][0]["index"] for d in deltas_of(chunks)[:-1]] == [0, 0, 1, 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_chat_gathers_its_calls() -> None:
    answer = chat_answer()
    answer.add(Delta([thought("Hm."), *call(0, "look", '{"at": ')]))
    answer.add(Delta([ToolCallArguments(0, '"x"}'), *call(1, "wait", "")], finish="tool_calls"))
    whole = answer.whole(USAGE)
    assert calls_of(whole) == [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "look", "arguments": '{"at": "x"}'},
        },
        {"id": "call_1", "type": "function", "function": {"name": "wait", "arguments": ""}},
    ]
    (choice,) = whole["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "Hm."
    assert choice["finish_reason"] == "tool_calls"


def test_what_is_said_beside_calls_is_content() -> None:
    answer = chat_answer()
    answer.add(Delta([said("Sure."), *call(0, "wait", "{}"), said("Done.")], finish="tool_calls"))
    whole = answer.whole(USAGE)
    assert whole["choices"][0]["message"]["content"] == "Sure.Done."
    assert len(calls_of(whole)) == 1
