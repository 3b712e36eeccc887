"""Rows: what a request is refused for, by the name of its field."""

from typing import Any

from server.config import LimitsSection
from server.protocol.common import (
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_TOKEN_IDS,
)
from tests.api.answers import PLACE
from tests.api.conftest import MAX_LEN
from tests.api.prompts import SAMPLING, USER
from tests.api.table import Refusal
from tests.api.wire import (
    ALL,
    CHAT,
    COMPLETIONS,
    FOUR,
    GENERATE,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    Api,
)
from tests.engines import VOCAB
from tests.server.harness import Json

LIMITS = LimitsSection()
NAN, INFINITE = float("nan"), float("inf")
NO_NUMBERS: tuple[Any, ...] = (NAN, INFINITE, -INFINITE, "zebra", True, [], {}, [1])
TOO_BIG = (2**70, -(2**70), 10**400)
NO_SCALARS: tuple[Any, ...] = ([1], {}, "zebra" * 60, 2**31, -(2**31), [True])
NO_WHOLE = (*NO_NUMBERS, *TOO_BIG, 1.5, "5")
WITH_CHOICE = (*OPENAIS, MESSAGES)
LOOK = {"name": "look", "parameters": PLACE}
HALF = "\ud800"


def make_function(**fields: Any) -> Json:
    return {"type": "function", "function": fields}


def add_parts(role: str, *parts: Any) -> list[Json]:
    return [USER, {"role": role, "content": list(parts)}]


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

STOPS = (
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

THINKING = (
    Refusal("an effort is one of some words", "reasoning_effort", (5, "zebra", ["low"]),
            apis=OPENAIS),
    Refusal("thoughts have a context that nobody chooses", bodies=(
        {"reasoning.context": "all_turns"},), param="reasoning.context", apis=(RESPONSES,)),
    Refusal("thoughts have a mode that nobody chooses", bodies=(
        {"reasoning.mode": "pro"},), param="reasoning.mode", apis=(RESPONSES,)),
    Refusal("thoughts are disabled, enabled or adaptive", bodies=(
        {"thinking": {"type": "zebra"}},), param="thinking.type", apis=(MESSAGES,)),
    Refusal("a budget of tokens is none below 0", bodies=(
        {"thinking": {"type": "enabled", "budget_tokens": -1}},), param="thinking.budget_tokens",
        apis=(MESSAGES,)),
    Refusal("an output's effort is one of some words", bodies=(
        {"output_config": {"effort": "zebra"}},), param="output_config.effort", apis=(MESSAGES,)),
    Refusal("Ollama's effort is one of some words", "think", ("zebra", 5), param="think",
            apis=(OLLAMA, GENERATE)),
    Refusal("arguments of the template are fields", "chat_template_kwargs", ([], "zebra"),
            apis=WITH_CHOICE),
    Refusal("whether to think is true or false", bodies=(
        {"chat_template_kwargs.enable_thinking": "no"},),
        param="chat_template_kwargs.enable_thinking", apis=WITH_CHOICE),
    Refusal("an argument of the template is a short text or a number", bodies=[
        {"chat_template_kwargs.other": value}
        for value in NO_SCALARS
    ], param="chat_template_kwargs.other", apis=WITH_CHOICE),
    Refusal("a template takes what it takes", bodies=(
        {"chat_template_kwargs.thinking_budget": 5},), param="chat_template_kwargs.thinking_budget",
        apis=WITH_CHOICE),
)  # fmt: skip

FORMS = (
    Refusal("a form is one of a few", "response_format", ("text",), apis=(CHAT,)),
    Refusal("a form has a type that there is", bodies=({"response_format": {"type": "xml"}},),
            param="response_format.type", apis=WITH_CHOICE),
    Refusal("a text has a type that there is", bodies=({"text.format": {"type": "xml"}},),
            param="text.format.type", apis=(RESPONSES,)),
    Refusal("a text of a schema has one", bodies=({"text.format": {"type": "json_schema"}},),
            param="text.format.schema", apis=(RESPONSES,)),
    Refusal("an output has a schema", bodies=({"output_config.format": {"type": "text"}},),
            param="output_config.format.type", apis=(MESSAGES,)),
    Refusal("a format is json or a schema", "format", ("yaml",), param="format",
            apis=(OLLAMA, GENERATE)),
    *(
        Refusal(f"{given} asks for no form that there is", bodies=(given,), param=param,
                apis=WITH_CHOICE)
        for given, param in (
            ({"guided_json": "{"}, "guided_json"),
            ({"guided_json": "[1]"}, "guided_json"),
            ({"guided_json": 5}, "guided_json"),
            ({"guided_choice": []}, "guided_choice"),
            ({"guided_choice": [1]}, "guided_choice[0]"),
            ({"guided_regex": 5}, "guided_regex"),
            ({"guided_regex": "("}, "guided_regex"),
            ({"structured_outputs": "json"}, "structured_outputs"),
            ({"structured_outputs": {"json": "no"}}, "structured_outputs.json"),
            (
                {"structured_outputs": {"structural_tag": {"a": 1}}},
                "structured_outputs.structural_tag",
            ),
        )
    ),
    *(
        Refusal(f"a long text {label} is no schema", bodies=({"guided_json": text},),
                param="guided_json", apis=WITH_CHOICE)
        for label, text in (
            ("of brackets", "[" * 5000), ("of numbers", f'{{"enum": [{"1, " * 40_000}1]}}'),
        )
    ),
    *(
        Refusal(f"{given} says twice what the answer must be", bodies=(given,), param=param,
                message="both say", apis=WITH_CHOICE)
        for given, param in (
            ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
            ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
            ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
        )
    ),
    Refusal("its own form and another are two", bodies=({"guided_regex": "a"},),
            param="guided_regex", message="both say", apis=(RESPONSES, MESSAGES), but={
                RESPONSES: {"bodies": (
                    {"guided_regex": "a", "text.format": {"type": "json_object"}},)},
                MESSAGES: {"bodies": ({
                    "guided_regex": "a",
                    "output_config.format": {"type": "json_schema", "schema": {}},
                },)},
            }),
    Refusal("a form is held to the end, which cannot be ignored", bodies=(
        {"ignore_eos": True, "guided_regex": "a"},), param="ignore_eos", apis=WITH_CHOICE),
    Refusal("a schema that cannot be enforced is refused by its place", bodies=(
        {"guided_json": {"type": "object", "not": {"a": 1}}},), param="guided_json", message="not",
        apis=WITH_CHOICE, but={
            CHAT: {"param": "response_format.json_schema.schema", "bodies": (
                {"response_format": {"type": "json_schema", "json_schema": {
                    "name": "n", "strict": True, "schema": {"type": "object", "not": {"a": 1}},
                }}},)},
            RESPONSES: {"param": "text.format.schema", "bodies": (
                {"text.format": {"type": "json_schema", "strict": True,
                                 "schema": {"$ref": "x"}}},), "message": ""},
            MESSAGES: {"param": "output_config.format.schema", "bodies": (
                {"output_config.format": {"type": "json_schema", "schema": {"not": {}}}},)},
        }),
)  # fmt: skip

OPENAI_NAMES = ("look", "", "a b", 'a"b', "a>b", "é", "x" * 129)
TOOLS = (
    *(
        Refusal(f"a function cannot have the name {name!r:.12} of another or of no letters",
                bodies=({"tools": tools},), param=param, apis=(api,))
        for name in OPENAI_NAMES
        for api, tools, param in (
            (CHAT, [make_function(**LOOK), make_function(name=name)], "tools[1].function.name"),
            (OLLAMA, [make_function(**LOOK), make_function(name=name)], "tools[1].function.name"),
            (RESPONSES, [{"type": "function", "name": "look"}, {"type": "function", "name": name}],
             "tools[1].name"),
            (MESSAGES, [{"name": "look"}, {"name": name}], "tools[1].name"),
        )
    ),
    *(
        Refusal(f"a tool of {tool} is none that can be called",
                bodies=({"tools": [make_function(**LOOK), tool]},), param=param, apis=apis)
        for tool, param, apis in (
            ({"type": "custom", "custom": {"name": "f"}}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "web_search"}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "custom", "function": {"name": "f"}}, "tools[1]", (CHAT, OLLAMA)),
            ({"type": "function"}, "tools[1].function", (CHAT, OLLAMA)),
            ({"type": "function", "name": "f"}, "tools[1].function", (CHAT, OLLAMA)),
        )
    ),
    *(
        Refusal(f"a message's tool of {tool} is none", bodies=({"tools": [tool]},), param=param,
                apis=(MESSAGES,))
        for tool, param in (
            ({"type": "bash_20250124", "name": "bash"}, "tools[0]"),
            ({"type": "computer_toolset_20260801"}, "tools[0]"),
            ({"type": "", "name": "f"}, "tools[0]"),
            ({"input_schema": PLACE}, "tools[0].name"),
        )
    ),
    *(
        Refusal(f"a response's tools are functions with names: {label}",
                bodies=({"tools": tools},), param=param, apis=(RESPONSES,))
        for label, tools, param in (
            ("no name", [{"type": "function"}], "tools[0].name"),
            ("no type", [{"name": "x"}], "tools[0].type"),
            ("a space in a group", [{"type": "namespace", "name": "n", "tools": [
                {"type": "function", "name": "a"}, {"type": "function", "name": "b c"},
            ]}], "tools[0].tools[1].name"),
            ("a space in the group's", [{"type": "namespace", "name": "n m", "tools": [
                {"type": "function", "name": "a"},
            ]}], "tools[0].tools[0].name"),
            ("twice in a group", [{"type": "namespace", "name": "n", "tools": [
                {"type": "function", "name": "a"}, {"type": "function", "name": "a"},
            ]}], "tools[0].tools[1].name"),
        )
    ),
    Refusal("there are 256 tools at most", param="tools",
            message="There are 257 tools; at most 256", but={
                **{api: {"bodies": ({"tools": [make_function(name=f"f{n}") for n in range(257)]},)}
                   for api in (CHAT, OLLAMA)},
                RESPONSES: {"bodies": ({"tools": [
                    {"type": "function", "name": f"f{n}"} for n in range(257)]},)},
                MESSAGES: {"bodies": ({"tools": [{"name": f"f{n}"} for n in range(257)]},)},
            }),
    Refusal("tools are a list", "tools", (LOOK, "zebra")),
    Refusal("the schema of a tool that must be called can be enforced", param="tools",
            message="contains", apis=OPENAIS, but={
                CHAT: {"bodies": ({"tool_choice": "required", "tools": [make_function(
                    name="f", strict=True, parameters={"properties": {"a": {"contains": {}}}},
                )]},)},
                RESPONSES: {"bodies": ({"tool_choice": "required", "tools": [{
                    "type": "function", "name": "f", "strict": True,
                    "parameters": {"properties": {"a": {"contains": {}}}},
                }]},)},
            }),
)  # fmt: skip


def choose(choice: Any, api: Api) -> Json:
    """A request with a tool and a choice."""
    tool = make_function(**LOOK) if api is CHAT else {"type": "function", "name": "look"}
    return {"tools": [{"name": "look"} if api is MESSAGES else tool], "tool_choice": choice}


ALLOWED = "tool_choice.allowed_tools"
CHOICES = (
    *(
        Refusal(f"nobody can choose {choice}", bodies=(choose(choice, api),), param=param,
                apis=(api,))
        for choice, param, apis in (
            ("any", "tool_choice", OPENAIS),
            ({"type": "function", "function": {"name": "write"}}, "tool_choice", OPENAIS),
            ({"type": "function"}, "tool_choice", OPENAIS),
            ({"type": "custom", "custom": {"name": "look"}}, "tool_choice", OPENAIS),
            ({"type": "web_search"}, "tool_choice", (RESPONSES,)),
            ({"type": "function", "name": "none"}, "tool_choice", (RESPONSES,)),
            ({"type": "namespace", "name": "look"}, "tool_choice", (RESPONSES,)),
            ({"type": "allowed_tools"}, f"{ALLOWED}.tools", (CHAT,)),
            ({"type": "allowed_tools"}, "tool_choice.tools", (RESPONSES,)),
            (
                {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "custom"}]}},
                f"{ALLOWED}.tools[0]",
                (CHAT,),
            ),
            (
                {"type": "allowed_tools", "tools": [{"name": "look"}, {"type": "web_search"}]},
                "tool_choice.tools[1]",
                (RESPONSES,),
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {
                    "mode": "some", "tools": [make_function(name="look")]}},
                f"{ALLOWED}.mode",
                (CHAT,),
            ),
            (
                {"type": "allowed_tools", "mode": "never", "tools": [{"name": "look"}]},
                "tool_choice.mode",
                (RESPONSES,),
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {
                    "tools": [make_function(name="look"), make_function(name="write")]}},
                "tool_choice",
                (CHAT,),
            ),
            ({"type": "tool", "name": "LOOK"}, "tool_choice.name", (MESSAGES,)),
            ({"type": "tool"}, "tool_choice.name", (MESSAGES,)),
            ("auto", "tool_choice", (MESSAGES,)),
        )
        for api in apis
    ),
    Refusal("nobody can choose a call without tools", bodies=({"tool_choice": "required"},),
            param="tool_choice", message="there are no tools", apis=WITH_CHOICE, but={
                MESSAGES: {"bodies": (
                    {"tool_choice": {"type": "any"}},
                    {"tool_choice": {"type": "tool", "name": "look"}},
                    {"tool_choice": {"type": "any"}, "tools": [{"type": "mcp_toolset"}]},
                )},
                RESPONSES: {"bodies": (
                    {"tool_choice": "required"},
                    {"tool_choice": "required", "tools": [{"type": "web_search"}]},
                    {"tool_choice": {"type": "function", "name": "look"}},
                )},
            }),
)  # fmt: skip

MANY = {"messages": [USER] * (LIMITS.max_messages + 1)}
CONVERSATIONS = (
    *(
        Refusal(f"a chat's messages cannot be {label}", bodies=({"messages": messages},),
                param=param, apis=apis)
        for label, messages, param, apis in (
            ("none", [], "messages", (CHAT, MESSAGES)),
            ("nothing", None, "messages", (CHAT, MESSAGES)),
            ("a text", "Hello", "messages", (CHAT, MESSAGES, OLLAMA)),
            ("texts", ["Hello"], "messages[0]", (CHAT, MESSAGES, OLLAMA)),
            ("of nobody", [{"content": "Hello"}], "messages[0].role", (CHAT, MESSAGES, OLLAMA)),
            ("of a robot", [{"role": "robot", "content": "x"}], "messages[0].role",
             (CHAT, MESSAGES, OLLAMA)),
            ("a number", [USER, USER | {"content": 5}], "messages[1].content",
             (CHAT, OLLAMA)),
            ("parts without a type", [USER | {"content": [{"text": "x"}]}],
             "messages[0].content", (CHAT,)),
            ("blocks without a type", [USER | {"content": [{"text": "x"}]}],
             "messages[0].content[0].type", (MESSAGES,)),
            ("calls of a text", [{"role": "assistant", "tool_calls": "f"}],
             "messages[0].tool_calls", (CHAT, OLLAMA)),
            ("a call of no function", [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
             "messages[0].tool_calls[0]", (CHAT,)),
            ("spoken", [USER, USER | {"audio": {"id": "a"}}], "messages[1].audio", (CHAT,)),
            ("heard", add_parts("user", {"type": "input_audio"}), "messages[1].content[0]",
             (CHAT, MESSAGES)),
            ("an image", add_parts("user", {"type": "image_url", "image_url": {"url": "x"}}),
             "messages[1].content[0]", (CHAT,)),
            ("an image beside a text", [USER | {"images": ["x"]}], "messages[0].images[0]",
             (OLLAMA,)),
            ("a use without a name", add_parts("assistant", {"type": "tool_use", "input": {}}),
             "messages[1].content[0].name", (MESSAGES,)),
        )
    ),
    *(
        Refusal(f"an input cannot be {label}", bodies=({"input": given},), param=param,
                apis=(RESPONSES,))
        for label, given, param in (
            ("nothing", None, "input"),
            ("empty", [], "input"),
            ("a number", 5, "input"),
            ("numbers", [5], "input[0]"),
            ("of nobody", [{"content": "x"}], "input[0].role"),
            ("of a robot", [{"role": "robot", "content": "x"}], "input[0].role"),
            ("a message of a number", [{"role": "user", "content": 5}], "input[0].content"),
            ("an item of no type", [{"type": 5}], "input[0].type"),
            ("a call without a name", [USER, {"type": "function_call"}], "input[1].name"),
            ("a reference to nothing", [{"type": "item_reference"}], "input[0].id"),
            ("a thought of a text", [{"type": "reasoning", "content": "x"}], "input[0].content"),
            ("heard", add_parts("user", {"type": "input_audio"}), "input[1].content[0]"),
            ("what is not stored", [USER, {"type": "item_reference", "id": "msg_0"}], "input[1]"),
            ("an id alone that is not stored", [USER, {"id": "msg_0"}], "input[1]"),
            ("what nobody reads", [{"type": "computer_call"}], "input"),
        )
    ),
    Refusal("there are so many messages at most", param="messages", bodies=(MANY,),
            message=f"at most {LIMITS.max_messages}", apis=FOUR, but={
                RESPONSES: {"param": "input", "bodies": ({"input": MANY["messages"]},)},
            }),
    Refusal("a system's message alone asks nothing", param="messages", apis=(MESSAGES,),
            bodies=({"messages": [{"role": "system", "content": ""}]},)),
    Refusal("an image beside a prompt is not shown", bodies=({"images": ["x"]},),
            param="images[0]", apis=(GENERATE,)),
    Refusal("metadata are texts", bodies=({"metadata": {"a": 1}},), param="metadata.a",
            apis=(RESPONSES,)),
    Refusal("what is not stored cannot be gone on with", "previous_response_id", ("resp_0", ""),
            message="as input", apis=(RESPONSES,)),
    Refusal("a prompt that does not fit is too long", "messages", apis=ALL,
            message=f"maximum context length is {MAX_LEN} tokens", but={
                CHAT: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},)},
                RESPONSES: {"bodies": ({"input": "x" * MAX_LEN},)},
                MESSAGES: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},),
                           "message": f"prompt is too long: 919 tokens > {MAX_LEN - 1} maximum",
                           "param": "prompt"},
                OLLAMA: {"bodies": ({"messages": [USER | {"content": "x" * MAX_LEN}]},)},
                COMPLETIONS: {"bodies": ({"prompt": "x" * MAX_LEN}, {"prompt": [1] * MAX_LEN},
                                         {"prompt": "x" * 10**6}), "param": "prompt"},
                GENERATE: {"bodies": ({"prompt": "x" * MAX_LEN},), "param": None},
            }),
    Refusal("half of a character is named by its place", apis=(CHAT, MESSAGES, OLLAMA),
            bodies=({"messages": [USER | {"content": HALF}]},), param="messages[0].content",
            message="half of a surrogate pair"),
)  # fmt: skip

CONTINUED = (
    *(
        Refusal(f"what {label} cannot be gone on with", bodies=(
            {name: turns} | fields,), param=where, apis=(api,))
        for label, turns, fields, where_by_api in (
            ("the user said last", [USER], {"continue_final_message": True},
             {CHAT: "continue_final_message", RESPONSES: "continue_final_message"}),
            ("is begun and is a new turn", [USER, {"role": "assistant", "content": "Once"}],
             {"continue_final_message": True, "add_generation_prompt": True},
             {CHAT: "add_generation_prompt", RESPONSES: "add_generation_prompt"}),
            ("is to have no new turn", [USER], {"add_generation_prompt": False},
             {CHAT: "add_generation_prompt", RESPONSES: "add_generation_prompt"}),
            ("is begun before another's turn",
             [USER, {"role": "assistant", "content": "Once", "prefix": True}, USER], {},
             {CHAT: "messages[1].prefix", RESPONSES: "input[1].prefix"}),
            ("the user begins", [USER | {"prefix": True}], {},
             {CHAT: "messages[0].prefix", RESPONSES: "input[0].prefix"}),
            ("has no question", [{"role": "assistant", "content": "Once"}],
             {"continue_final_message": True},
             {CHAT: "messages", MESSAGES: "messages", OLLAMA: "messages", RESPONSES: "input"}),
        )
        for api, where in where_by_api.items()
        for name in ("input" if api is RESPONSES else "messages",)
    ),
    Refusal("a call cannot be gone on with", apis=WITH_CHOICE, param="messages",
            bodies=({"continue_final_message": True, "messages": [USER, {
                "role": "assistant", "content": "Once",
                "tool_calls": [{"function": {"name": "look"}}],
            }]},), but={
                MESSAGES: {"bodies": ({"messages": add_parts(
                    "assistant", {"type": "tool_use", "id": "a", "name": "look"})},)},
                RESPONSES: {"param": "input", "bodies": ({"continue_final_message": True, "input": [
                    USER, {"type": "function_call", "call_id": "a", "name": "look"},
                ]},)},
            }),
)  # fmt: skip

TEXTS = (
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
            ("half a character", HALF, "prompt"),
        )
    ),
    Refusal("the answers to all prompts are too many", bodies=({"prompt": ["x"] * 64, "n": 8},),
            param="prompt", message="n is 8 and there are 64 promp", apis=(COMPLETIONS,)),
)  # fmt: skip

REFUSALS = (
    *NUMBERS, *STOPS, *FLAGS, *UNSUPPORTED, *THINKING, *FORMS, *TOOLS, *CHOICES, *CONVERSATIONS,
    *CONTINUED, *TEXTS,
)  # fmt: skip
