"""A model's template cannot hang the start, take its memory, or reach anything."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.text import template_trial
from server.text.limited_process import KEPT_VARIABLES, LimitedProcess, Limits
from server.text.template_trial import TemplateTrial, TimeLimit, TimeUp, fault_of, render_all
from tests.clients.servers import run_to_end
from tests.models import TEMPLATE, XML_TEMPLATE
from tests.server.harness import DEADLINE_S, eventually

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


SHORT_S = 0.1
ENDS = 1000
# In a process of its own: what measures and reports a test must not be hit. Threads take turns as
# often as they can.
ENDS_AT_ANY_TIME = f"""
import sys, threading
from server.text.template_trial import TimeLimit, TimeUp

sys.setswitchinterval(1e-5)
hits = 0
for attempt in range({ENDS}):
    limit, go = TimeLimit({DEADLINE_S}), threading.Event()

    def end(limit=limit, go=go):
        go.wait()
        limit.end()

    other = threading.Thread(target=end)
    other.start()
    try:
        with limit:
            go.set()
            for _ in range(attempt):
                sum(range(3))
    except TimeUp:
        hits += 1
    # Lines enough for whatever is still on its way.
    for _ in range(100):
        sum(range(3))
    other.join()
print(hits)
"""


def for_ever() -> None:
    """Code that catches whatever it can, and goes on."""
    while True:
        try:
            sum(i for i in range(1000))
        except Exception:
            continue


def within(limit: TimeLimit, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with limit:
            return work()

    return run


async def test_what_comes_to_an_end_is_left_alone() -> None:
    limit = TimeLimit(DEADLINE_S)
    assert await limit.run(within(limit, lambda: 7)) == 7
    limit = TimeLimit(DEADLINE_S)
    with pytest.raises(ZeroDivisionError):
        await limit.run(within(limit, lambda: 1 // 0))


async def test_what_does_not_is_ended_whatever_it_catches() -> None:
    limit = TimeLimit(SHORT_S)
    began = time.monotonic()
    with pytest.raises(TimeUp):
        await limit.run(within(limit, for_ever))
    assert SHORT_S <= time.monotonic() - began < DEADLINE_S


async def test_only_what_stands_within_is_ended() -> None:
    limit = TimeLimit(SHORT_S)

    def work() -> str:
        with limit:
            pass
        time.sleep(5 * SHORT_S)
        return "done"

    assert await limit.run(work) == "done"


async def test_time_counts_from_when_the_code_begins() -> None:
    limit = TimeLimit(5 * SHORT_S)

    def work() -> str:
        time.sleep(10 * SHORT_S)
        with limit:
            time.sleep(SHORT_S)
        return "done"

    assert await limit.run(work) == "done"


async def test_code_that_nobody_waits_for_any_more_is_ended() -> None:
    limit, ended = TimeLimit(DEADLINE_S), threading.Event()
    begun = threading.Event()

    def work() -> None:
        try:
            with limit:
                begun.set()
                for_ever()
        except TimeUp:
            ended.set()

    running = asyncio.ensure_future(limit.run(work))
    await eventually(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(ended.is_set)


def test_code_that_comes_too_late_does_not_begin() -> None:
    limit = TimeLimit(DEADLINE_S)
    limit.end()
    limit.end()
    with pytest.raises(TimeUp), limit:
        raise AssertionError("it began")


def test_an_end_that_comes_at_any_time_hits_nothing_else() -> None:
    done = run_to_end(sys.executable, "-c", ENDS_AT_ANY_TIME)
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 < int(done.stdout) < ENDS


def test_an_end_that_comes_behind_the_code_is_waited_for() -> None:
    limit = TimeLimit(9.0)
    with pytest.raises(TimeUp), limit:
        limit._ended = True  # by another thread, whose exception is still on its way
