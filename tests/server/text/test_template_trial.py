"""A model's template cannot hang the start, take its memory, or reach anything."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from server.text import template_trial
from server.text.limited_process import KEPT_VARIABLES, LimitedProcess, Limits
from server.text.template_trial import TemplateTrial, fault_of, render_all
from tests.models import TEMPLATE, XML_TEMPLATE

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(s='x') %}"
    "{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
POWER = "{% if tools %}{{ 9 ** (9 ** 9) }}{% endif %}{{ messages[0].content }}"
SHORT = Limits(2.0, 1 << 30)


def try_template(template: str, special_tokens: dict[str, str]) -> TemplateTrial:
    with LimitedProcess() as process:
        return template_trial.try_template(process, [template], special_tokens)


@pytest.mark.parametrize("template", [TEMPLATE, XML_TEMPLATE, "{{ eos_token }}"])
def test_a_template_that_renders_is_found_to(template: str) -> None:
    assert try_template(template, {"eos_token": "</s>"}) == TemplateTrial("")


@pytest.mark.parametrize(
    "template", [NESTED, DOUBLED, "{{ 'x' * 10**10 }}", "{{ '%09999999999d' % 1 }}", POWER]
)
def test_threat_19_a_template_that_takes_too_much_is_ended(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, "LIMITS", SHORT)
    began = time.monotonic()
    found = try_template(template, {})
    assert not found.ends
    assert found.fault in ("it takes more than 2 s", "it takes more than 1024 MiB of memory")
    assert time.monotonic() - began < 60


def test_threat_19_memory_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much a template takes within its time depends on the machine."""
    monkeypatch.setattr(template_trial, "LIMITS", Limits(5.0, 1 << 20))
    found = try_template(TEMPLATE, {"eos_token": "</s>"})
    assert found.fault == "it takes more than 1 MiB of memory"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}\n{% if %}", "TemplateSyntaxError in line 2: Expected an express"),
        ("{{ '' }}\n{{ raise_exception('no') }}", "TemplateError in line 2: no"),
        ("{{ messages[0].a.b }}", "UndefinedError in line 1: 'dict object' has no attribute 'a'"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError in line 1: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError in line 1: access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "TypeError in line 1: no loader"),
        ("{% import 'os' as os %}{{ os.system('id') }}", "TypeError in line 1: no loader"),
        ("{% from 'os' import system %}", "TypeError in line 1: no loader"),
        ("{{ range(10 ** 9) }}", "OverflowError in line 1: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError in line 1: "),
    ],
)
def test_threat_19_a_template_that_fails_or_reaches_out_is_told_with_its_line(
    template: str, fault: str
) -> None:
    """In this process: all of these come to an end."""
    assert render_all([template], {}).startswith(fault)


def test_what_templates_may_refuse_is_no_fault() -> None:
    template = "{% if messages | length > 1 or tools %}{{ raise_exception('no') }}{% endif %}x"
    assert render_all([template], {}) == ""


def test_a_template_that_takes_all_memory_is_no_template_that_fails() -> None:
    with pytest.raises(MemoryError):
        render_all(["{{ 'x' * 10**17 }}"], {})


def test_each_of_several_templates_is_tried() -> None:
    assert render_all(["x", "{{ raise_exception('no') }}"], {}) == "TemplateError in line 1: no"


def test_the_message_of_an_error_is_left_out_where_it_may_repeat_a_prompt() -> None:
    error = ValueError("a prompt")
    assert fault_of(error, with_message=False) == "ValueError"
    assert fault_of(error, with_message=True) == "ValueError: a prompt"
    assert len(fault_of(ValueError("x" * 9999), with_message=True)) == 300


def test_threat_19_the_process_is_given_no_keys_and_no_files_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the working directory is not imported in place of the real one."""
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", "sk-zebra-canary-0123456789")
    (tmp_path / "transformers.py").write_text("raise SystemExit('zebra')")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit('zebra')")
    monkeypatch.chdir(tmp_path)
    given: list[dict[str, Any]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **how: Any) -> Any:
        given.append(how)
        return popen(*arguments, **how)

    monkeypatch.setattr(subprocess, "Popen", noted)
    assert try_template("x", {}) == TemplateTrial("")
    (how,) = given
    assert set(how["env"]) <= set(KEPT_VARIABLES)
    assert "zebra" not in str(how["env"])


@pytest.mark.parametrize(
    ("program", "fault", "ends"),
    [
        ("import sys; sys.exit(3)", "its process ended with 3", True),
        (
            "print('ready'); import sys; sys.exit(3)",
            "its process ended with 3",
            False,
        ),
        (
            "import os; os.write(1, b'ready\\n'); os.kill(os.getpid(), 9)",
            "its process ended with -9",
            False,
        ),
        ("import time; time.sleep(60)", "it takes more than 1 s", True),
        (
            "import time; print('ready', flush=True); time.sleep(60)",
            "it takes more than 2 s",
            False,
        ),
    ],
)
@pytest.mark.usefixtures("limited_program")
def test_a_process_that_cannot_try_it_is_no_reason_not_to_use_it(
    program: str, fault: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that ends in the middle is."""
    monkeypatch.setattr(template_trial, "LIMITS", SHORT)
    assert try_template("x" * 10**6, {}) == TemplateTrial(fault, ends)
