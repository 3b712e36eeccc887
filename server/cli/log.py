"""Sets up logs, to standard error or a file, as text for people or as JSON lines for programs."""

import logging
import sys
from contextlib import suppress
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from server.catalogue.names import printable
from server.config import LogSection, SettingError

FIRST, LAST = ("timestamp", "level", "logger", "event"), ("request_id",)
# In a log entry, the values of these fields may have several lines.
PAGES = ("banner", "exception", "stack")
# A terminal shows these fields of an HTTP request's log entry as one sentence.
SENTENCE = ("method", "endpoint", "status", "duration_s")


def configure_log(section: LogSection) -> None:
    """Set up structlog and logging. Raises SettingError if the log file cannot be opened."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if section.format == "json":
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handlers = _handlers(section)
    for handler, terminal in handlers:
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared,
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    *_renderers(section.format, terminal=terminal),
                ],
            )
        )
    root = logging.getLogger()
    root.handlers[:] = [handler for handler, _ in handlers]
    root.setLevel(section.level.upper())
    # httpx2 logs each request of a download at level info, which would break the progress bar.
    logging.getLogger("httpx2").setLevel(
        logging.WARNING if section.level == "info" else logging.NOTSET
    )


def _handlers(section: LogSection) -> list[tuple[logging.Handler, bool]]:
    """Return the log's handlers, each paired with True if the handler writes to a terminal."""
    terminal = sys.stderr.isatty()
    stderr: tuple[logging.Handler, bool] = (logging.StreamHandler(sys.stderr), terminal)
    if section.file is None:
        return [stderr]
    file = (rotating(section.file, section), False)
    return [file, stderr] if terminal else [file]


class LogFile(RotatingFileHandler):
    """A log file that stays in use after a write has failed, such as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report a lost entry on one line; without this method logging prints a traceback."""
        del record
        with suppress(OSError):
            sys.stderr.write(f"quire: an entry of the log is lost: {sys.exception()}\n")


def rotating(file: Path, section: LogSection) -> logging.Handler:
    """Open a log file that rotates at its size limit. Raises SettingError."""
    try:
        path = file.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(
            path,
            maxBytes=section.max_file_bytes,
            backupCount=section.max_files - 1,
            encoding="utf-8",
        )
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(f"setting log.file: {file}: {why}") from error


def _renderers(form: str, *, terminal: bool) -> list[Processor]:
    if form == "json":
        return [in_order, structlog.processors.JSONRenderer()]
    console = structlog.dev.ConsoleRenderer(
        colors=terminal,
        # structlog's default traceback shows local variables, which include prompts.
        exception_formatter=structlog.dev.plain_traceback,
        sort_keys=False,
        pad_event_to=0,
    )

    def page_or_line(logger: WrappedLogger, name: str, entry: EventDict) -> str:
        page = entry.get("banner")
        return console(logger, name, entry) if page is None else str(page)

    return [*([for_a_terminal] if terminal else []), in_order, in_one_line, page_or_line]


def in_one_line(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    """Escape line breaks in a log entry's values: a model's name may contain some."""
    return {
        name: printable(value) if isinstance(value, str) and name not in PAGES else value
        for name, value in entry.items()
    }


def in_order(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    ends = {*FIRST, *LAST}
    middle = [name for name in entry if name not in ends]
    return {name: entry[name] for name in (*FIRST, *middle, *LAST) if name in entry}


def for_a_terminal(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    """Shorten a log entry: give the local time of day, and describe a request in one sentence."""
    timestamp = datetime.fromisoformat(entry["timestamp"]).astimezone()
    short: dict[str, Any] = {**entry, "timestamp": f"{timestamp:%H:%M:%S}"}
    del short["logger"]
    if entry["event"] == "request":
        method, endpoint, status, duration_s = (short.pop(name) for name in SENTENCE)
        short["event"] = f"{method} {endpoint} {status or 'unanswered'} in {duration_s:.2f} s"
        # Leave out fields of the value None or False.
        short = {name: value for name, value in short.items() if value not in (None, False)}
    return short
