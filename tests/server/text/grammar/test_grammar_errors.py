import pytest

from server.text.grammar.grammar_errors import GrammarError, errors_of, meaning


@pytest.mark.parametrize(
    ("complaint", "says"),
    [
        ("oneOf constraints are not supported. Enable 'coerce_one_of'", "oneOf"),
        ('min/maxProperties only supported when all keys listed in "properties"', "minProperties"),
        ("patternProperty regexes /secret/ and /b/ are not disjoint", "patternProperties"),
        ("Pointer '/$defs/secret' does not exist", "$ref"),
        ("circular references with sibling keys are not supported: secret", "$ref"),
        ("Schema intersection stack level exceeded", "$ref"),
        ("Unsatisfiable schema: required property 'secret' is unsatisfiable", "no answer"),
        ('invalid regex "secret": look-around, including look-ahead', "look-around"),
        ("regex parse error: secret", "pattern"),
        ("lark grammar too deeply nested (at secret)", "nested"),
        ("schema too large", "too large"),
        ("initial lexer configuration (grammar) too big (limit for this grammar: 1)", "too large"),
        ("NoExtensionBias\n<state> secret oneOf", "no answer"),
        ("Failed to generate regex for float range: min=secret", "a range of numbers"),
        ("secret", "not valid"),
    ],
)
def test_complaints_are_told_in_fixed_words(complaint: str, says: str) -> None:
    assert says in meaning(complaint)
    assert "secret" not in meaning(complaint)


def test_a_fault_names_the_field_that_it_is_of() -> None:
    with pytest.raises(GrammarError) as caught, errors_of("tools"):
        raise GrammarError("it is too large")
    assert (str(caught.value), caught.value.param) == ("it is too large", "tools")
    with pytest.raises(GrammarError) as caught, errors_of("tools"), errors_of("response_format"):
        raise GrammarError("")
    assert caught.value.param == "response_format"
