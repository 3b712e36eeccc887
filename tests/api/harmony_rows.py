"""Rows: a model that answers in Harmony, in channels, as gpt-oss does."""

import json

from server.text.conversation import ToolCall, Turn
from tests.api.table import (
    CHAT,
    MESSAGES,
    OLLAMA,
    OPENAIS,
    RESPONSES,
    THINKING,
    WITH_CHOICE,
    Behaviour,
    Refusal,
)
from tests.api.wire import HELLO, Api, Ask
from tests.api.words import BOTH, WAIT
from tests.server.harness import Json

NEXT = "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
THINKS = f"{ANALYSIS}Hm.{NEXT}"
LOOKS = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "a"}<|call|>'
LOOKS_TOO = ' to=functions.look<|channel|>commentary json<|message|>{"at": "a"}<|call|>'
FUNCTIONS = "# Tools\n\n## functions\n\nnamespace functions {\n\n" + "".join(
    f"// \ntype {tool.name} = (_: {json.dumps(tool.parameters)}) => any;\n\n" for tool in BOTH
) + "} // namespace functions"  # fmt: skip


def read(*messages: str, effort: str = "medium", tools: str = "", answer: str = "") -> str:
    """What the model reads. messages: with their headers."""
    head = f"<|start|>system<|message|>You are a model.\nReasoning: {effort}\n\n"
    head += "# Valid channels: analysis, commentary, final."
    if tools:
        head += "\nCalls to these tools must go to the commentary channel: functions."
        head += f"<|end|><|start|>developer<|message|>{tools}"
    return "".join(f"{one}<|end|><|start|>" for one in (head, *messages)) + "assistant" + answer


ASKS = "user<|message|>Hello"
CALLED = Turn("assistant", "", "Hm.", (ToolCall("1", "look", '{"at": "a"}'),))
RESULT = Turn("tool", "7", tool_call_id="1")
ONE_CALL = (
    'assistant to=functions.look<|channel|>commentary json<|message|>{"at": "a"}<|call|>'
    '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"7"'
)

ANSWERS = (
    Behaviour(
        "channels are thoughts and text",
        says=f"{THINKS}{FINAL}Yes.<|return|>",
        thoughts="Hm.",
        text="Yes.",
        thought_tokens=len("Hm.") + 1,
        apis=THINKING,
        but={
            RESPONSES: {"parts": ["reasoning", "message"]},
            MESSAGES: {"parts": ["thinking", "text"]},
        },
    ),
    *(
        Behaviour(
            f"a call whose recipient comes {where} is one, and what comes before it is text",
            says=f"{THINKS}<|channel|>commentary<|message|>I look.{NEXT}{call}",
            ask=Ask(tools=BOTH),
            thoughts="Hm.",
            text="I look.",
            calls=[("look", {"at": "a"})],
            finish="tool_calls",
            but={
                RESPONSES: {"parts": ["reasoning", "message", "function_call"]},
                MESSAGES: {"parts": ["thinking", "text", "tool_use"]},
            },
        )
        for where, call in (
            ("after the channel", LOOKS),
            ("before the channel", LOOKS_TOO),
        )
    ),
    Behaviour(
        "a call of a tool that nobody offers is a thought",
        says='<|channel|>analysis to=browser.search code<|message|>{"query": "a"}<|call|>',
        ask=Ask(tools=BOTH),
        thoughts='{"query": "a"}',
        text="",
    ),
    Behaviour(
        "a header that is cut off is nothing",
        says=f"{THINKS}{LOOKS}",
        ask=Ask(tools=BOTH, length=30),
        thoughts="Hm.",
        text="",
        finish="length",
        tokens=len("CanalysisMHm.ESassistantCcomme"),
    ),
    Behaviour(
        "headers have no probabilities",
        says=f"{THINKS}{FINAL}Yes.<|return|>",
        ask=Ask(logprobs=0),
        thoughts="Hm.",
        text="Yes.",
        logprobs=list("Hm.Yes."),
        apis=(CHAT,),
    ),
)  # fmt: skip

FORMS = (
    Behaviour(
        "a form is that of the final message",
        says=f"{THINKS}{FINAL}perhaps",
        ask=Ask(form={"enum": ["yes", "no"]}),
        thoughts="Hm.",
        text=('"yes"', '"no"'),
        held=True,
    ),
    *(
        Behaviour(
            f"a call that {choice} asks for satisfies its schema",
            says=f"{THINKS}<|channel|>commentary to=functions.wait json<|message|>no",
            ask=Ask(tools=(WAIT,), choice=choice),
            thoughts="Hm.",
            text="",
            calls=[("wait", {})],
            finish="tool_calls",
            held=True,
            apis=WITH_CHOICE,
        )
        for choice in ("wait", "required")
    ),
    Behaviour(
        "thoughts end with their budget",
        # The grammar forces the message's end and a header in place of the model's own tokens.
        says=f"{ANALYSIS}abc{'d' * 12}final<|message|>Yes.<|return|>",
        ask=Ask(thinks=3),
        thoughts="abc",
        text="Yes.",
        held=True,
        apis=WITH_CHOICE,
    ),
)

EFFORTS: tuple[tuple[Json, str, bool, tuple[Api, ...]], ...] = (
    ({"reasoning_effort": "none"}, "low", False, OPENAIS),
    ({"reasoning_effort": "minimal"}, "low", False, OPENAIS),
    ({"reasoning_effort": "low"}, "low", False, OPENAIS),
    ({"reasoning_effort": "medium"}, "medium", False, OPENAIS),
    ({"reasoning_effort": "high"}, "high", False, OPENAIS),
    ({"reasoning_effort": "max"}, "high", False, OPENAIS),
    ({"reasoning": {"effort": "low"}}, "low", False, OPENAIS),
    ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high", False, WITH_CHOICE),
    ({"enable_thinking": False}, "low", False, WITH_CHOICE),
    ({"output_config": {"effort": "high"}}, "high", False, (MESSAGES,)),
    ({"thinking": {"type": "disabled"}}, "low", False, (MESSAGES,)),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium", True, (MESSAGES,)),
    ({"think": "low"}, "low", False, (OLLAMA,)),
    ({"think": False}, "low", False, (OLLAMA,)),
    ({"think": True}, "medium", False, (OLLAMA,)),
)
PROMPTS = (
    *(
        Behaviour(
            f"{fields} is the effort {effort}",
            says=f"{FINAL}Yes.<|return|>",
            text="Yes.",
            fields=fields,
            prompt=read(ASKS, effort=effort),
            held=held,
            apis=apis,
        )
        for fields, effort, held, apis in EFFORTS
    ),
    Behaviour(
        "thoughts are kept until an answer is final, and results name their tool",
        says=f"{FINAL}Yes.<|return|>",
        ask=Ask((HELLO, CALLED, RESULT), BOTH),
        text="Yes.",
        prompt=read(
            ASKS, "assistant<|channel|>analysis<|message|>Hm.", ONE_CALL, tools=FUNCTIONS
        ),
    ),
    Behaviour(
        "thoughts before a final answer are left out",
        says=f"{FINAL}Yes.<|return|>",
        ask=Ask((HELLO, CALLED, RESULT, Turn("assistant", "7.", "So."), HELLO), BOTH),
        text="Yes.",
        prompt=read(
            ASKS, ONE_CALL, "assistant<|channel|>final<|message|>7.", ASKS, tools=FUNCTIONS
        ),
    ),
    Behaviour(
        "a text that is begun is gone on with as the final message",
        says=" Yes.<|return|>",
        ask=Ask((HELLO, Turn("assistant", "On")), goes_on=True),
        text=" Yes.",
        prompt=read(ASKS, answer=f"{FINAL}On"),
    ),
)  # fmt: skip

BEHAVIOURS = (*ANSWERS, *FORMS, *PROMPTS)

REFUSALS = (
    Refusal("a client does not turn the model's own tools on", bodies=[
        {"chat_template_kwargs.builtin_tools": names} for names in ("browser", ["python"])
    ], param="chat_template_kwargs.builtin_tools", apis=WITH_CHOICE),
    Refusal("the model's own tools are no functions", bodies=[
        {"tools": [{"type": name}]} for name in ("browser", "python")
    ], param="tools[0]", apis=(CHAT, OLLAMA)),
)  # fmt: skip
