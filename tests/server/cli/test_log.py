import json
import logging

import pytest
import structlog

from server.cli.log import configure_log
from server.config import LogSection

pytestmark = pytest.mark.usefixtures("own_log")
SECRET = "zebra-canary"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    written = capsys.readouterr()
    assert written.out == ""
    return written.err.splitlines()


def fail(prompt: str) -> None:
    raise ValueError(f"{len(prompt)} characters are too many")


def test_machines_get_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log(LogSection(format="json"))
    structlog.get_logger("quire").info("serving", port=8000)
    logging.getLogger("asyncio").warning("%d connections", 5)
    ours, theirs = (json.loads(line) for line in lines(capsys))
    assert (ours["event"], ours["level"], ours["logger"]) == ("serving", "info", "quire")
    assert ours["port"] == 8000
    assert (theirs["event"], theirs["level"]) == ("5 connections", "warning")
    assert theirs["logger"] == "asyncio"
    for entry in (ours, theirs):
        assert entry["timestamp"].endswith("Z")


def test_people_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log(LogSection())
    structlog.get_logger("quire").info("serving", port=8000)
    logging.getLogger("engine.loop").error("step failed")
    ours, theirs = lines(capsys)
    assert "serving" in ours
    assert "port=8000" in ours
    assert "step failed" in theirs
    assert "\x1b" not in ours + theirs  # no colours where nobody sees them


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_holds_for_all(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_log(LogSection.model_validate({"level": level, "format": "json"}))
    for name in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger("quire"), name)("ours")
        getattr(logging.getLogger("theirs"), name)("theirs")
    seen = [json.loads(line)["level"] for line in lines(capsys)]
    expected = ["debug", "info", "warning", "error"]
    expected = expected[expected.index(level) :]
    assert seen == [name for name in expected for _ in range(2)]


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_show_no_contents_of_variables(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_log(LogSection.model_validate({"format": form}))
    try:
        fail(SECRET)
    except ValueError:
        structlog.get_logger("quire").exception("ours")
        logging.getLogger("theirs").exception("theirs")
    text = "\n".join(lines(capsys))
    assert text.count(f"{len(SECRET)} characters are too many") == 2
    assert text.count("in fail") == 2
    assert SECRET not in text


def test_configuring_twice_does_not_say_things_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        configure_log(LogSection(format="json"))
    logging.getLogger("theirs").warning("once")
    assert len(lines(capsys)) == 1
