import ast

from tests.planted.suites import ROOT, AnchorError, read_mistakes


def test_what_a_mistake_replaces_stands_in_its_function_once() -> None:
    errors = []
    for mistake in read_mistakes():
        text = (ROOT / mistake.file).read_text()
        try:
            planted = mistake.plant(text)
        except AnchorError as error:
            errors.append(f"{mistake.name}: {error}")
            continue
        assert planted != text, mistake.name
        assert mistake.parts
        if mistake.file.endswith(".py"):
            ast.parse(planted, mistake.name)
    assert errors == []
