import pytest

from server.text.chat_template import template_arguments

TOKENS = ("bos_token", "eos_token")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("{% if preserve_thinking %}x{% endif %}", {"preserve_thinking"}),
        ("{% if effort is not defined %}{% set effort = 1 %}{% endif %}{{ effort }}", {"effort"}),
        ("{% macro m(a) %}{{ a }}{{ deep }}{% endmacro %}{{ m(1) }}", {"deep"}),
        ("{% set own = 1 %}{{ own }}{% for m in messages %}{{ m.a }}{% endfor %}", set()),
        ("{{ bos_token }}{{ tools }}{{ add_generation_prompt }}{{ documents }}", set()),
        (
            "{{ range(3) }}{{ namespace(a=1) }}{{ strftime_now('') }}{{ raise_exception('') }}",
            set(),
        ),
        ("{{ chat_template }}{{ self }}{{ conversations }}{{ tokenize }}", set()),
        ("{% for m in messages %}{% if a %}{% continue %}{% endif %}{% endfor %}", {"a"}),
        ("{% generation %}{{ a }}{% endgeneration %}", {"a"}), ("{% if %}", set()),
        # Set by the template itself, in whatever branch.
        ("{% if tools %}{% if a %}{% set own = 1 %}{% endif %}{{ own }}{% endif %}", {"a"}),
        ("{% if a %}{% set own = 1 %}{% else %}{% set own = 2 %}{% endif %}{{ own }}", {"a"}),
        ("{% if a %}{% elif b %}{% set own = 1 %}{% endif %}{{ own }}", {"a", "b"}),
        ("{% for m in messages if a %}{% set own = m %}{{ own }}{% endfor %}", {"a"}),
        ("{% set own %}{{ a }}{% endset %}{{ own }}", {"a"}),
        ("{% macro m(a, b=c) %}{{ a }}{{ b }}{% endmacro %}{{ b }}", {"b", "c"}),
        (
            "{% if a %}{% set ns = namespace(x=1) %}{% set ns.x = b %}{% endif %}{{ ns.x }}",
            {"a", "b"},
        ),
        # Set, but only where nobody gave them.
        ("{% set own = own or a %}{{ own }}", {"own", "a"}),
        ("{% set own = own is defined and own %}{{ own }}", {"own"}),
    ],
)  # fmt: skip
def test_what_is_looked_up_and_not_supplied_is_taken(text: str, taken: set[str]) -> None:
    assert template_arguments([text], TOKENS) == taken


def test_several_templates_take_what_each_takes() -> None:
    assert template_arguments(["{{ a }}", "{{ b }}"], TOKENS) == {"a", "b"}
