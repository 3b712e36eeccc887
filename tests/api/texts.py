"""Rows: texts, their ends, and log-probabilities."""

from server.protocol.common import MAX_LOGIT_BIASES, MAX_STOP_STRING_CHARS, MAX_STOP_TOKEN_IDS
from server.text.conversation import Turn
from tests.api.conftest import MAX_LEN
from tests.api.table import (
    ALL,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    SAMPLING,
    THINKING,
    Behaviour,
    Refusal,
)
from tests.api.wire import Ask
from tests.api.words import BOTH, INFINITE, LIMITS, NAN, SURROGATE, call, think
from tests.engines import VOCAB
from tests.server.harness import END

HALF = "\N{REPLACEMENT CHARACTER}"
# Of the prompt that Ask() makes: one a byte, and one for each tag.
PROMPT_TOKENS = len("|user\nHello|\n|assistant\n")

TEXTS = (
    Behaviour("an answer is what the model says", says="Grüße 😀!", tokens=14, apis=ALL),
    Behaviour(
        "whatever ends lines elsewhere is text",
        says="a\n\nb\r\n\tc\x85\N{LINE SEPARATOR}\"\N{SNOWMAN}\N{LINE SEPARATOR}",
        apis=ALL,
    ),
    Behaviour("an answer of nothing has no text", says="", tokens=1, but={
        RESPONSES: {"parts": ["message"]},
        MESSAGES: {"parts": []},
    }, apis=ALL),
    Behaviour(
        "the end of the turn ends the answer and is no part of it",
        says=f"Hello.{END}more",
        text="Hello.",
        tokens=7,
        apis=ALL,
    ),
    Behaviour(
        "an answer has at most as many tokens as are wanted",
        says="a long answer",
        ask=Ask(length=7),
        text="a long ",
        finish="length",
        tokens=7,
        parts=None,
        but={RESPONSES: {"parts": ["message, incomplete"]}},
        apis=ALL,
    ),
    Behaviour(
        "an answer without a limit ends with the context",
        says="x" * MAX_LEN,
        ask=Ask(length=None),
        text="x" * (MAX_LEN - PROMPT_TOKENS),
        finish="length",
        but={
            COMPLETIONS: {"text": "x" * 16, "tokens": 16},
            MESSAGES: {
                "ask": Ask(length=32_000),
                "finish": "model_context_window_exceeded",
            },
        },
        apis=ALL,
    ),
    *(
        Behaviour(
            f"a limit of {length} is none",
            ask=Ask(length=length),
            heard={"max_tokens": MAX_LEN - PROMPT_TOKENS},
            apis=apis,
            but={COMPLETIONS: {"heard": {"max_tokens": MAX_LEN - len("Hello")}}},
        )
        for length, apis in (
            (-1, (*OPENAIS, OLLAMA, COMPLETIONS)),
            (2**31 - 1, (*OPENAIS, OLLAMA)),
            (0, (OLLAMA, GENERATE)),
            (-2, (OLLAMA,)),
        )
    ),
    Behaviour(
        "the newer name of the answer's length wins",
        says="abcdefgh",
        ask=Ask(length=None),
        text="abc",
        finish="length",
        apis=OPENAIS,
        but={
            CHAT: {"fields": {"max_tokens": 7, "max_completion_tokens": 3}},
            RESPONSES: {"fields": {"max_tokens": 7, "max_output_tokens": 3}},
        },
    ),
    Behaviour(
        "the older name of the answer's length is known",
        says="abcdefgh",
        ask=Ask(length=None),
        fields={"max_tokens": 3},
        text="abc",
        finish="length",
        apis=OPENAIS,
        but={CHAT: {"fields": {"max_completion_tokens": 3}}},
    ),
    Behaviour(
        "half a character at the end becomes a sign for one",
        says="a😀",
        ask=Ask(length=3),
        text="a" + HALF,
        finish="length",
        apis=ALL,
    ),
    Behaviour("any name of the model will do", fields={"model": "org/alias"}, apis=ALL),
    Behaviour("a name may have the tag latest", fields={"model": "recall:latest"}, apis=(OLLAMA,)),
    Behaviour(
        "thoughts are not taken out of a text that is gone on with",
        says="<think>Hm.</think>Yes.",
        thought_tokens=0,
        apis=(COMPLETIONS,),
    ),
    Behaviour(
        "a raw prompt is gone on with",
        says="<think>in a time.",
        ask=Ask((Turn("user", f"Once{END}"),), stop=("time",)),
        fields={"raw": True},
        text="<think>in a ",
        prompt=f"Once{END}",
        apis=(GENERATE,),
    ),
)  # fmt: skip

STOPS = (
    *(
        Behaviour(
            f"of {says!r} nothing is sent from {' or '.join(stop)} on",
            says=says,
            ask=Ask(stop=stop),
            text=text,
            stopped_by=stopped_by,
            apis=ALL,
        )
        for says, stop, text, stopped_by in (
            ("one STOP two", ("STOP",), "one ", "STOP"),
            ("one STOP two", ("two", "STOP"), "one ", "STOP"),
            ("one STO two", ("STOP",), "one STO two", ""),
            ("STOP", ("STOP",), "", "STOP"),
            ("ends with STO", ("STOP",), "ends with STO", ""),
            ("a€b", ("€",), "a", "€"),
            ("one STOP", ("P",), "one STO", "P"),
            ("a😀", (HALF,), "a😀", ""),
        )
    ),
    Behaviour(
        "what may begin a stop string is sent when the answer is cut off",
        says="a STOP",
        ask=Ask(stop=("STOP",), length=5),
        text="a STO",
        finish="length",
        apis=ALL,
    ),
    Behaviour(
        "the sign for half a character may be a stop string",
        says="a😀",
        ask=Ask(stop=(HALF,), length=3),
        text="a",
        stopped_by=HALF,
        apis=ALL,
    ),
    Behaviour(
        "a stop string ends the work as well",
        says="one STOP" + "x" * 50,
        ask=Ask(stop=("STOP",)),
        text="one ",
        tokens=len("one STOP"),
        stopped_by="STOP",
        apis=ALL,
    ),
    Behaviour(
        "a stop string counts in what is said, and not in thoughts",
        says="<think>a STOP b</think>c STOP d",
        ask=Ask(stop=("STOP",)),
        thoughts="a STOP b",
        text="c ",
        stopped_by="STOP",
        apis=THINKING,
    ),
    Behaviour(
        "one stop string needs no list",
        says="one STOP two",
        fields={"stop": "STOP"},
        text="one ",
        apis=(*OPENAIS, COMPLETIONS, OLLAMA),
        but={OLLAMA: {"fields": {"options": {"stop": "STOP"}}}},
    ),
    Behaviour(
        "an agent may have many stop strings",
        ask=Ask(stop=("es.", *(f"<|{number}|>" for number in range(500)))),
        text="Y",
        stopped_by="es.",
        apis=(MESSAGES, OLLAMA, GENERATE),
    ),
    Behaviour(
        "other tokens may end an answer and are no part of it",
        says="abcd",
        fields={"stop_token_ids": [ord("c") - ord("!")]},
        text="ab",
        tokens=3,
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "the model's own end may be ignored",
        says=f"a{END}b{END}c",
        ask=Ask(length=5),
        fields={"ignore_eos": True},
        text="abc",
        finish="length",
        tokens=5,
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "an answer has at least as many tokens as are wanted",
        says=f"a{END}{END}{END}b",
        fields={"min_tokens": 4},
        tokens=6,
        text="a!!!b",
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
    Behaviour(
        "a bias moves the answer",
        says=None,
        ask=Ask(length=3),
        fields={"logit_bias": {str(ord("Z") - ord("!")): 100}},
        text="ZZZ",
        finish="length",
        apis=(*OPENAIS, MESSAGES, COMPLETIONS),
    ),
)

LOGPROBS = (
    Behaviour(
        "log-probabilities cover every token of the text",
        says="né!",
        ask=Ask(logprobs=2),
        logprobs=["n", HALF, HALF, "!"],
        apis=(*OPENAIS, OLLAMA, GENERATE, COMPLETIONS),
        but={COMPLETIONS: {"logprobs": ["n", HALF, HALF, "!", END]}},
    ),
    Behaviour(
        "log-probabilities are told beside the text alone",
        says=think("Hm.", f"Yes.\n{call('wait')}"),
        ask=Ask(logprobs=0, tools=BOTH),
        thoughts="Hm.",
        text="Yes.",
        calls=[("wait", {})],
        finish="tool_calls",
        logprobs=["\n", "\n", *"Yes."],
        apis=(RESPONSES,),
    ),
)

BEHAVIOURS = (*TEXTS, *STOPS, *LOGPROBS)

WRONG_STOPS = (
    Refusal("a stop string is a text of some letters", "stop",
            (5, [5], "", ["a", ""], ["a", None], "x" * (MAX_STOP_STRING_CHARS + 1), [""]),
            apis=ALL,
            but={MESSAGES: {"values": ("a", 5, ["a", ""], ["x" * 257])}}),
    Refusal("there are so many stop strings at most", "stop",
            (["a"] * (LIMITS.max_stop_strings + 1),), message="at most", apis=ALL,
            but={api: {"values": (["a"] * 513,)} for api in (MESSAGES, OLLAMA, GENERATE)}),
    Refusal("a token that ends an answer is one of the model's", "stop_token_ids",
            (5, [VOCAB], [0] * (MAX_STOP_TOKEN_IDS + 1)), apis=SAMPLING),
    Refusal("a token that ends an answer is a number", "stop_token_ids", ([-1], ["5"], [True]),
            param="stop_token_ids[0]", apis=SAMPLING),
    Refusal("a bias is a number from -100 to 100 for a token of the model's", "logit_bias",
            ([], [1], {"5": "1"}, {"5": INFINITE}, {"5": NAN}, {"5": True}, {"-1": 1},
             {"\u0665": 1}, {"9" * 5000: 1}, {"x": 1}, {"": 1}, {"1.0": 1}, {str(VOCAB): 1},
             {"1" * 11: 1}, {"1": 101}, {"1": 0, "2": -101},
             {str(number): 0 for number in range(MAX_LOGIT_BIASES + 1)}),
            apis=SAMPLING),
    *(
        Refusal(f"the bias of {key!r} is said to be wrong", "logit_bias", ({"0": 1, key: amount},),
                message=f"'{key}'", apis=SAMPLING)
        for key, amount in (("1000000", 1), ("many", 1), ("5", 101))
    ),
)  # fmt: skip

WRONG_PROMPTS = (
    *(
        Refusal(f"a prompt cannot be {label}", bodies=({"prompt": prompt},), param=param,
                apis=(COMPLETIONS,))
        for label, prompt, param in (
            ("nothing", None, "prompt"),
            ("a number", 5, "prompt"),
            ("fields", {}, "prompt"),
            ("empty", "", "prompt"),
            ("no tokens", [], "prompt"),
            ("an empty text", [""], "prompt"),
            ("empty beside another", ["one", ""], "prompt[1]"),
            ("no tokens beside others", [[1], []], "prompt[1]"),
            ("a number beside a text", ["one", 2], "prompt[1]"),
            ("null", [None], "prompt[0]"),
            ("true", [True], "prompt[0]"),
            ("lists of lists", [[[1]]], "prompt[0][0]"),
            ("a token below 0", [1, -1], "prompt[1]"),
            ("a token of another model", [VOCAB], "prompt"),
            ("a token of another model beside others", [[1], [VOCAB]], "prompt[1]"),
            ("a token that nobody counts", [2**31], "prompt[0]"),
            ("too long beside another", ["one", "x" * MAX_LEN], "prompt[1]"),
            ("of too many", ["one"] * (LIMITS.max_prompts + 1), "prompt"),
            ("half a character", SURROGATE, "prompt"),
        )
    ),
    Refusal("the answers to all prompts are too many", bodies=({"prompt": ["x"] * 64, "n": 8},),
            param="prompt", message="n is 8 and there are 64 promp", apis=(COMPLETIONS,)),
)  # fmt: skip

REFUSALS = (*WRONG_STOPS, *WRONG_PROMPTS)
