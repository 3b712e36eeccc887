"""Rows: fields of a request that are no part of its prompt."""

from server.protocol.common import MAX_CACHE_SALT_CHARS
from tests.api.table import (
    ALL,
    CHAT,
    COMPLETIONS,
    FOUR,
    GENERATE,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    SAMPLING,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import Ask
from tests.api.words import HELLO_READ, LIMITS, NO_NUMBERS, NO_WHOLE, TOO_BIG, call, render

EVERYTHING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.5,
    "seed": 42,
}
WITHOUT = {"temperature": None, "top_p": None, "seed": None, "stop": None, "top_k": None}
BEHAVIOURS = (
    Behaviour(
        "every parameter reaches the engine",
        ask=Ask(length=1),
        is_read=False,
        fields=EVERYTHING | {
            "repetition_penalty": 1.5, "logit_bias": {"5": -100, "99": 2.5}, "min_tokens": 1,
            "stop_token_ids": [990], "priority": -3,
        },
        heard=EVERYTHING | {
            "repetition_penalty": 1.5, "logit_bias": ((5, -100.0), (99, 2.5)), "min_tokens": 1,
            "priority": -3, "max_tokens": 1,
        },
        apis=(*SAMPLING, OLLAMA, GENERATE),
        but={
            api: {
                "fields": {"options": EVERYTHING | {
                    "repeat_penalty": 1.5, "repeat_last_n": -1, "num_ctx": 17, "heard_of": "no",
                }},
                "heard": EVERYTHING | {"repetition_penalty": 1.5, "max_tokens": 1},
            }
            for api in (OLLAMA, GENERATE)
        },
    ),
    Behaviour(
        "who says nothing gets openai's defaults",
        ask=Ask(length=1),
        is_read=False,
        fields=WITHOUT,
        heard={
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "priority": 0,
            "min_tokens": 0,
        },
        apis=(*SAMPLING, OLLAMA),
        but={OLLAMA: {"fields": {"options": WITHOUT}}},
    ),
    *(
        Behaviour(
            f"{name} {given} is taken for {taken}",
            ask=Ask(length=1),
            is_read=False,
            fields={name: given},
            heard={name: taken},
            apis=(*SAMPLING, OLLAMA),
            but={OLLAMA: {"fields": {"options": {name: given}}}},
        )
        for name, given, taken in (
            ("temperature", 1e-38, 0.0),
            ("top_p", 1e-46, 1e-6),
            ("top_p", 0, 1e-6),
            ("top_k", -1, 0),
            ("top_k", 20.0, 20),
            ("seed", 0, 0),
            ("seed", 7.0, 7),
            ("seed", -2, 2**64 - 2),
            ("seed", 2**63 - 1, 2**63 - 1),
        )
    ),
    *(
        Behaviour(
            f"of repeat_last_n {last} the penalties are {kept}",
            fields={"options": {
                "repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1,
                "repeat_last_n": last,
            }},
            heard={
                "repetition_penalty": 1.5 if kept else 1.0,
                "presence_penalty": kept, "frequency_penalty": kept,
            },
            apis=(OLLAMA, GENERATE),
        )
        for last, kept in ((0, 0), (64, 1), (-1.0, 1))
    ),
    Behaviour(
        "options that Ollama's page shows are taken",
        fields={"options": {
            "num_keep": 5, "seed": 42.0, "top_k": 20, "typical_p": 0.7, "repeat_last_n": 33,
            "penalize_newline": True, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6,
            "tfs_z": 0.5, "numa": False, "num_ctx": 1024, "num_batch": 2.0, "num_gpu": 1,
            "main_gpu": 0, "low_vram": False, "use_mmap": True, "num_thread": 8,
        }},
        heard={"seed": 42, "top_k": 20},
        apis=(OLLAMA, GENERATE),
    ),
    Behaviour(
        "null is as if a field were not there",
        fields=dict.fromkeys((
            "model", "top_k", "min_p", "presence_penalty", "frequency_penalty", "n", "logit_bias",
            "cache_report", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "seed",
            "tools", "tool_choice", "parallel_tool_calls", "response_format", "enable_thinking",
            "chat_template_kwargs", "reasoning", "think", "format", "images", "keep_alive",
            "best_of", "suffix", "echo", "logprobs", "top_logprobs", "user", "metadata",
        )),
        apis=ALL,
    ),
    Behaviour(
        "fields that cannot change an answer are ignored",
        fields={
            "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
            "zebra": [None], "model_fields": 1, "_private": {}, "a b": [1],
        },
        apis=ALL,
    ),
    Behaviour(
        "a text may be given as ids",
        fields={"prompt": [39, 40]},
        prompt="HI",
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "no fields that say nothing are refused",
        fields={"suffix": "", "best_of": 1, "echo": False},
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "empty lists of tools are none",
        says=call("wait"),
        fields={"tools": []},
        prompt=render(HELLO_READ),
        apis=FOUR,
    ),
)  # fmt: skip

NUMBERS = (
    *(
        Refusal(f"{name} is a number from {least} to {most}", name,
                (*NO_NUMBERS, *TOO_BIG, *wrong), apis=(*ALL,))
        for name, least, most, wrong in (
            ("temperature", 0, 2, (-0.1, 2.1)),
            ("top_p", 0, 1, (-0.1, 1.1)),
            ("min_p", 0, 1, (-0.1, 1.1)),
            ("presence_penalty", -2, 2, (-2.1, 2.1)),
            ("frequency_penalty", -2, 2, (-2.1, 2.1)),
            ("repetition_penalty", 0.01, 10, (0, 11)),
            ("seed", "-2^63", "2^63 - 1", (2**63, -(2**63) - 1, 1.5)),
            ("top_k", -1, "2^31 - 1", (-2, 2**31, 1.5)),
        )
    ),
    Refusal(
        "an answer's length is a whole number",
        "max_tokens",
        (*NO_WHOLE, -3, 2**31),
        apis=ALL,
        but={MESSAGES: {"values": (*NO_WHOLE, 0, -1, 2**31, None)}},
    ),
    Refusal("an answer has a token at least", "max_tokens", (0, -2),
            apis=(*OPENAIS, COMPLETIONS, MESSAGES)),
    Refusal("the newer name of the length is a whole number as well", "max_completion_tokens",
            (*NO_WHOLE, 0, -2, 2**31), apis=(CHAT,)),
    Refusal("a number of answers is a whole one, within a limit", "n",
            (*NO_WHOLE, 0, -1, LIMITS.max_choices + 1), apis=(*OPENAIS, COMPLETIONS)),
    Refusal("a message is one answer", param="n", bodies=({"n": 2},), apis=(MESSAGES,)),
    Refusal("a response is one answer", "n", (2,), apis=(RESPONSES,)),
    Refusal("a priority is a whole number", "priority", (*NO_WHOLE, 2**31, -(2**31)),
            apis=SAMPLING),
    Refusal("a least length is a whole number that fits", "min_tokens", (*NO_WHOLE, -1, 301),
            apis=SAMPLING),
    Refusal("a budget of thoughts is a whole number", "thinking_token_budget", (*NO_WHOLE, -1),
            apis=OPENAIS),
    Refusal("so is the one of the other name", "thinking_budget", (*NO_WHOLE, -1), apis=OPENAIS),
    Refusal("how many alternatives are told is a whole number, within a limit", "top_logprobs",
            bodies=[{"logprobs": True, "top_logprobs": value} for value in (*NO_WHOLE, -1, 21)],
            apis=(CHAT, OLLAMA, GENERATE), param="top_logprobs"),
    Refusal("who wants alternatives wants log-probabilities", "top_logprobs", (3,),
            bodies=({"top_logprobs": 2, "logprobs": False},), apis=(CHAT, OLLAMA, GENERATE)),
    Refusal("a response tells of so many alternatives at most", "top_logprobs", (*NO_WHOLE, -1, 21),
            apis=(RESPONSES,)),
    Refusal("a text tells of five alternatives at most", "logprobs", (*NO_WHOLE, -1, 6),
            apis=(COMPLETIONS,)),
)  # fmt: skip

FLAGS = (
    *(
        Refusal(f"{name} is true or false", name, (1, "yes", "zebra"), param=name, apis=apis)
        for name, apis in (
            ("ignore_eos", SAMPLING),
            ("cache_report", SAMPLING),
            ("parallel_tool_calls", OPENAIS),
            ("enable_thinking", WITH_CHOICE),
            ("add_generation_prompt", OPENAIS),
            ("echo", (COMPLETIONS,)),
            ("raw", (GENERATE,)),
            ("logprobs", (CHAT, OLLAMA)),
        )
    ),
    Refusal("a salt is a text of some letters", "cache_salt",
            ("", "x" * (MAX_CACHE_SALT_CHARS + 1), 5, ["zebra"], "zebra" * 999), apis=ALL),
    Refusal("a cache is kept in memory or longer", "prompt_cache_retention",
            ("", "1h", 24, True, ["zebra"]), apis=ALL),
    Refusal("a model is named by a text", "model", (5, ["zebra"]), apis=ALL),
    Refusal("options of a stream are fields", "stream_options", ([], True),
            apis=(*OPENAIS, COMPLETIONS)),
    Refusal("another model is not found", "model", ("gpt-5",), status=404, apis=ALL,
            but={api: {"param": None, "message": "model 'gpt-5' not found"}
                 for api in (OLLAMA, GENERATE)}),
)  # fmt: skip

UNSUPPORTED = (
    *(
        Refusal(f"{name} is not supported", name, (value,), param=name, message="is not supported",
                apis=apis)
        for name, value, apis in (
            ("bad_words", ["zebra"], SAMPLING),
            ("use_beam_search", True, SAMPLING),
            ("functions", [{"name": "zebra"}], OPENAIS),
            ("audio", {"voice": "zebra"}, (CHAT,)),
            ("chat_template", "zebra", OPENAIS),
            ("add_special_tokens", True, (CHAT, COMPLETIONS)),
            ("guided_regex", "zebra", (COMPLETIONS,)),
            ("prompt_embeds", "AAAA", (COMPLETIONS,)),
            ("suffix", "zebra", (COMPLETIONS, GENERATE)),
            ("best_of", 2, (COMPLETIONS,)),
            ("conversation", "conv_1", (RESPONSES,)),
            ("background", True, (RESPONSES,)),
            ("reasoning_effort", "low", (MESSAGES,)),
            ("top_logprobs", 5, (MESSAGES,)),
            ("tool_choice", "required", (OLLAMA,)),
            ("template", "zebra", (OLLAMA, GENERATE)),
            ("context", [1, 2], (GENERATE,)),
        )
    ),
    Refusal("stop strings have Anthropic's name", bodies=({"stop": ["a"]},), param="stop",
            message="use stop_sequences", apis=(MESSAGES,)),
    Refusal("options have Ollama's names", bodies=({"options.max_tokens": 5},), param="max_tokens",
            message="use num_predict", apis=(OLLAMA, GENERATE)),
    Refusal("options are fields", "options", ([], "zebra"), apis=(OLLAMA, GENERATE)),
    Refusal("the last tokens that count are a whole number", bodies=(
        {"options.repeat_last_n": "64"}, {"options.repeat_last_n": 0.5},
    ), param="options.repeat_last_n", apis=(OLLAMA, GENERATE)),
    Refusal("a model is kept for a duration", "keep_alive", ("zebra", "1d", "9" * 5000),
            message="keep_alive is no duration", apis=(OLLAMA, GENERATE)),
    *(
        Refusal(f"{name} needs a template, and a raw prompt has none",
                bodies=({"raw": True, name: value},), param=name,
                message=f"{name} is not supported with raw", apis=(GENERATE,))
        for name, value in (("system", "x"), ("format", "json"), ("think", True), ("images", ["x"]))
    ),
)  # fmt: skip

REFUSALS = (*NUMBERS, *FLAGS, *UNSUPPORTED)
