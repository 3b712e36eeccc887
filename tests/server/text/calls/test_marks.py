import pytest

from server.text.calls.marks import MAX_AROUND_CHARS, CallMarks, MarkError

ONE = '<tool_call>\n{"name":"look"}\n</tool_call>'
TWO = "<function=wait>\n</function>\n</tool_call>"


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


def xml(name: str) -> str:
    return f"<tool_call>\n<function={name}>\n</function>\n</tool_call>"


def test_what_a_template_makes_of_marks_is_replaced() -> None:
    marks = CallMarks(str)
    assert not marks
    one, two = marks.add(ONE), marks.add(TWO)
    assert marks
    between = "call: <tool_call> ... </tool_call>; "
    prompt = f"{between}{hermes(one)}, {hermes('other')}{between}{xml(two)}{between}"
    assert marks.replaced(prompt) == f"{between}{ONE}, {hermes('other')}{between}{TWO}{between}"


def test_two_prompts_have_no_mark_in_common() -> None:
    assert CallMarks(str).add(ONE) != CallMarks(str).add(ONE)


def test_more_than_ten_calls_are_told_apart() -> None:
    marks = CallMarks(str)
    names = [marks.add(f"<{number}>") for number in range(12)]
    assert marks.replaced("".join(map(hermes, names))) == "".join(f"<{n}>" for n in range(12))


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "{0}{1}{1}",
        "{0}<tool_call>name</tool_call>",
        "{1}{0}",
        "<tool_call>" + "." * MAX_AROUND_CHARS + "{mark0}</tool_call>{1}",
        "<tool_call>{mark0}" + "." * MAX_AROUND_CHARS + "</tool_call>{1}",
        "{mark0}</tool_call>{1}",
        "{1}<tool_call>{mark0}",
        "<tool_call>{mark0}{mark1}</tool_call>",
    ],
)
def test_a_template_that_does_more_with_calls_is_found_out(prompt: str) -> None:
    marks = CallMarks(str)
    names = [marks.add(ONE), marks.add(TWO)]
    with pytest.raises(MarkError):
        marks.replaced(prompt.format(*map(hermes, names), mark0=names[0], mark1=names[1]))
