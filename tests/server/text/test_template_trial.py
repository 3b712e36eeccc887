"""A model's template cannot hang the start, take its memory, or reach anything."""

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from kvcache.child import Child, LimitError, Limits
from server.text import template_trial
from server.text.template_trial import TimeLimit, TimeUp, fault_of, render_all
from tests.clients.servers import run_to_end
from tests.models import TEMPLATE, XML_TEMPLATE
from tests.server.harness import DEADLINE_S, eventually

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(s='x') %}"
    "{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
POWER = "{% if tools %}{{ 9 ** (9 ** 9) }}{% endif %}{{ messages[0].content }}"
SHORT = Limits(2.0, 2.0, 1 << 30)


def try_template(template: str, limits: Limits = template_trial.LIMITS) -> str:
    with closing(Child()) as process:
        return str(process.call(limits, render_all, [template], {"eos_token": "</s>"}))


@pytest.mark.parametrize("template", [TEMPLATE, XML_TEMPLATE, "{{ eos_token }}"])
def test_a_template_that_renders_is_found_to(template: str) -> None:
    assert try_template(template) == ""


@pytest.mark.parametrize(
    "template", [NESTED, DOUBLED, "{{ 'x' * 10**10 }}", "{{ '%09999999999d' % 1 }}", POWER]
)
def test_threat_19_a_template_that_takes_too_much_is_ended(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(LimitError, match=r"^it takes more than (2 s|1024 MiB of memory)$"):
        try_template(template, SHORT)
    assert time.monotonic() - began < 60


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


def test_an_end_that_comes_behind_the_code_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # The exception is still on its way.
    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", lambda *_: 1)
    limit = TimeLimit(9.0)
    with pytest.raises(TimeUp), limit:
        limit.end()
