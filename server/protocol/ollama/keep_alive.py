"""How long a model should stay in memory after a request: ``keep_alive``."""

import math
import re

from server.protocol.wire_errors import invalid

# Go's durations: https://pkg.go.dev/time#ParseDuration.
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
NUMBER = r"(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
PART = re.compile(f"({NUMBER})(ns|us|µs|μs|ms|s|m|h)")
DURATION = re.compile(f"([+-]?)((?:{PART.pattern})+|{NUMBER})", re.ASCII)


def keep_alive_s(value: float | str | None) -> float | None:
    """Return for how many seconds; infinity for ever, where it is below 0; 0 for not at all; None
    where nothing is said. value: seconds, or a duration such as "10m" or "1h30m"; a text without
    unit is seconds, too. Raises ApiError (400)."""
    if value is None:
        return None
    seconds = _seconds(value) if isinstance(value, str) else value
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float:
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise invalid(
            'keep_alive is no duration: write seconds, or a text such as "10m"; -1 is for ever, 0 '
            "is not at all.",
            "keep_alive",
        )
    sign, whole = found[1], found[2]
    parts = PART.findall(whole)
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    return (seconds if parts else float(whole)) * (-1 if sign == "-" else 1)
