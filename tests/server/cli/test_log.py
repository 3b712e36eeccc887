import json
import logging
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from server.cli.log import configure_log
from server.config import LogSection, SettingError

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
    logging.getLogger("engine.step.loop").error("step failed")
    ours, theirs = lines(capsys)
    assert "serving" in ours
    assert "port=8000" in ours
    assert "step failed" in theirs
    assert "\x1b" not in ours + theirs  # no colours where nobody sees them


# Of folders, on a disk that takes any.
NAMES = (
    "ev\x1b[31mil\nFAKE [info] line",
    "ev\ril",
    "ev\x08\x08il",
    "ev\u202eil",
    "ev\u2028il",
    "ev\x9b2Jil",
    "ev\udcffil",
    "ev\til",
)


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


# --- at a terminal, in a file -----------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A person looks at standard error."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)


def plain(line: str) -> str:
    """The line without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def log_request(**fields: object) -> None:
    line: dict[str, object] = {
        "method": "POST",
        "endpoint": "/v1/chat/completions",
        "status": 200,
        "duration_s": 1.25,
        "tokens_per_s": 41.2,
        "prompt_tokens": 812,
        "client_left": False,
    }
    with structlog.contextvars.bound_contextvars(request_id="req_7"):
        structlog.get_logger("quire.requests").info("request", **(line | fields))


@pytest.mark.usefixtures("terminal")
def test_a_request_is_a_short_line_at_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log(LogSection())
    log_request()
    (line,) = map(plain, lines(capsys))
    said = re.fullmatch(r"\d\d:\d\d:\d\d \[info *\] (.*)", line)
    assert said is not None, line
    assert said[1] == (
        "POST /v1/chat/completions 200 in 1.25 s "
        "tokens_per_s=41.2 prompt_tokens=812 request_id=req_7"
    )


@pytest.mark.usefixtures("terminal")
def test_at_a_terminal_what_is_unknown_is_left_out_and_a_client_that_left_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_log(LogSection())
    log_request(status=None, tokens_per_s=None, client_left=True)
    structlog.get_logger("quire").warning("short of memory", pages=3)
    request, other = map(plain, lines(capsys))
    assert "POST /v1/chat/completions unanswered in 1.25 s prompt_tokens=812" in request
    assert "client_left=True" in request
    assert other.endswith("] short of memory pages=3")


def test_a_page_of_text_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log(LogSection())
    structlog.get_logger("quire").info("serving", banner="one\n  two\n")
    assert lines(capsys) == ["one", "  two", ""]


def test_a_file_has_the_log_in_place_of_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made" / "quire.log"
    configure_log(LogSection(file=file))
    structlog.get_logger("quire").info("serving", port=8000)
    assert lines(capsys) == []
    assert "serving [quire] port=8000" in file.read_text()


@pytest.mark.usefixtures("terminal")
def test_a_file_and_a_terminal_both_have_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_log(LogSection(file=tmp_path / "quire.log"))
    log_request()
    (line,) = lines(capsys)
    assert "in 1.25 s" in plain(line)
    written = (tmp_path / "quire.log").read_text()
    assert re.match(r"\d{4}-\d\d-\d\dT", written), "a file has the whole date"
    assert "duration_s=1.25" in written
    assert "\x1b" not in written


def test_a_file_that_is_full_is_set_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    file = tmp_path / "quire.log"
    configure_log(LogSection(file=file, max_file_bytes=65536, max_files=3))
    for number in range(4000):
        structlog.get_logger("quire").info("x" * 100, number=number)
    kept = sorted(tmp_path.iterdir())
    assert [path.name for path in kept] == ["quire.log", "quire.log.1", "quire.log.2"]
    assert all(path.stat().st_size <= 65536 for path in kept)
    assert "number=3999" in file.read_text()
    assert "number=0 " not in "".join(path.read_text() for path in kept)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk here")
@pytest.mark.parametrize("entries", [1, 2, 5, 10, 20, 50])
def test_an_entry_that_a_full_disk_loses_is_a_line(
    entries: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quire.log").symlink_to("/dev/full")
    configure_log(LogSection(file=tmp_path / "quire.log"))
    for number in range(entries):
        structlog.get_logger("quire").info("serving", number=number)
    for handler in logging.getLogger().handlers:
        with suppress(OSError):  # what it still has is lost as well
            handler.close()
    lost = "quire: an entry of the log is lost: [Errno 28] No space left on device"
    assert lines(capsys) == [lost] * entries


@pytest.mark.parametrize("name", NAMES)
def test_no_name_begins_a_line_or_moves_the_cursor(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_log(LogSection())
    structlog.get_logger("quire").info(f"loading {name}", model=name)
    (line,) = lines(capsys)
    assert plain(line).isprintable()
    assert "loading ev" in line


def test_a_file_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    file = tmp_path / "taken" / "quire.log"
    with pytest.raises(SettingError, match=rf"^setting log\.file: {re.escape(str(file))}: \w"):
        configure_log(LogSection(file=file))


def test_a_file_in_a_home_that_is_not_there_is_refused_in_one_sentence() -> None:
    with pytest.raises(SettingError, match=r"^setting log\.file: ~nobody-here/x: .*home"):
        configure_log(LogSection(file=Path("~nobody-here/x")))
