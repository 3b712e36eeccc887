"""Rows: thoughts, and how a client asks for them."""

from tests.api.table import (
    GENERATE,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    THINKING,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import Ask
from tests.api.words import HELLO_READ, NO_SCALARS, SILENT, render, think

THOUGHTS = (
    Behaviour(
        "thoughts are kept apart from the answer",
        says=think("Hm.", "Yes."),
        thoughts="Hm.",
        text="Yes.",
        thought_tokens=len("\nHm.\n") + 1,
        apis=THINKING,
        but={
            RESPONSES: {"parts": ["reasoning", "message"]},
            MESSAGES: {"parts": ["thinking", "text"]},
        },
    ),
    Behaviour(
        "a thought that is cut off is no answer",
        says="<think>Let me see",
        ask=Ask(length=8),
        thoughts="Let me",
        text="",
        finish="length",
        apis=THINKING,
        but={RESPONSES: {"parts": ["reasoning, incomplete"]}, MESSAGES: {"parts": ["thinking"]}},
    ),
    Behaviour(
        "thoughts may be all",
        says="<think>\nHm.",
        thoughts="Hm.",
        text="",
        apis=THINKING,
    ),
    Behaviour(
        "half a tag at the end of thoughts is a part of them",
        says="<think>a < b </thi",
        thoughts="a < b </thi",
        text="",
        apis=THINKING,
    ),
    Behaviour("half a tag at the beginning is text", says="<thi", thought_tokens=0, apis=THINKING),
    Behaviour(
        "thoughts begin an answer, and nowhere else",
        says="Hello <think>no</think>",
        thought_tokens=0,
        apis=THINKING,
    ),
    Behaviour(
        "thoughts end with their budget",
        says="<think>abcdefgh</think>Yes.",
        ask=Ask(thinks=3, length=6),
        thoughts="abc",
        text="e",
        finish="length",
        held=True,
        apis=WITH_CHOICE,
    ),
    Behaviour(
        "a budget has a second name",
        says="<think>abcdefgh</think>Yes.",
        ask=Ask(length=6),
        fields={"thinking_budget": 3},
        thoughts="abc",
        text="e",
        finish="length",
        held=True,
        apis=OPENAIS,
    ),
    Behaviour(
        "thoughts can be packed for who sends them back",
        says=think("Hm.", "Yes."),
        fields={"include": ["reasoning.encrypted_content"]},
        thoughts="Hm.",
        text="Yes.",
        apis=(RESPONSES,),
    ),
)

WISHES = (
    *(
        Behaviour(
            f"{fields} turns thoughts off",
            fields=fields,
            prompt=render(HELLO_READ, answer=SILENT),
            held=False,
            apis=apis,
        )
        for fields, apis in (
            ({"chat_template_kwargs": {"enable_thinking": False}}, WITH_CHOICE),
            ({"enable_thinking": False}, WITH_CHOICE),
            (
                {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
                WITH_CHOICE,
            ),
            ({"reasoning_effort": "none"}, OPENAIS),
            ({"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, OPENAIS),
            ({"reasoning": {"enabled": False, "exclude": True}}, OPENAIS),
            ({"reasoning": {"enabled": True}, "enable_thinking": False}, OPENAIS),
            ({"reasoning_effort": "high", "enable_thinking": False}, OPENAIS),
            ({"thinking": {"type": "disabled"}}, (MESSAGES,)),
            ({"thinking": {"type": "between_tools"}}, (MESSAGES,)),
            (
                {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
                (MESSAGES,),
            ),
            ({"think": False}, (OLLAMA, GENERATE)),
        )
    ),
    *(
        Behaviour(
            f"{fields} lets the model think{', within a budget' * held}",
            fields=fields,
            prompt=render(HELLO_READ),
            held=held,
            apis=apis,
        )
        for fields, held, apis in (
            ({"chat_template_kwargs": {"enable_thinking": True}}, False, WITH_CHOICE),
            ({"chat_template_kwargs": {"enable_thinking": None}}, False, WITH_CHOICE),
            ({"reasoning_effort": "minimal"}, True, OPENAIS),
            ({"reasoning_effort": "low"}, True, OPENAIS),
            ({"reasoning_effort": "medium"}, True, OPENAIS),
            ({"reasoning_effort": "high"}, False, OPENAIS),
            ({"reasoning_effort": "xhigh"}, False, OPENAIS),
            ({"reasoning_effort": "max"}, False, OPENAIS),
            ({"reasoning": {}}, False, OPENAIS),
            ({"reasoning": {"effort": "low", "summary": "auto"}}, True, OPENAIS),
            ({"reasoning": {"max_tokens": 5.0}}, True, OPENAIS),
            ({"thinking_token_budget": 0}, True, OPENAIS),
            ({"thinking": {"type": "adaptive", "display": "omitted"}}, False, (MESSAGES,)),
            ({"thinking": {"type": "enabled"}}, False, (MESSAGES,)),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, (MESSAGES,)),
            ({"output_config": {"effort": "low"}}, True, (MESSAGES,)),
            ({"output_config": {"effort": "high"}}, False, (MESSAGES,)),
            ({"think": True}, False, (OLLAMA, GENERATE)),
            ({"think": "low"}, True, (OLLAMA, GENERATE)),
            ({"think": "high"}, False, (OLLAMA, GENERATE)),
        )
    ),
)

BEHAVIOURS = (*THOUGHTS, *WISHES)

REFUSALS = (
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
