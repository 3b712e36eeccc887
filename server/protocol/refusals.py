"""Why requests and connections are refused: guards count it, and a metric shows it."""

from collections.abc import Callable
from enum import StrEnum


class Refusal(StrEnum):
    """Why something was refused: the only values that a metric's label takes."""

    HOST = "host"
    ORIGIN = "origin"
    KEY = "key"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    SLOW_READER = "slow_reader"
    BAD_HTTP = "bad_http"
    CONNECTIONS = "connections"
    QUEUE_FULL = "queue_full"
    KEY_SHARE = "key_share"
    DRAINING = "draining"


CountRefusal = Callable[[Refusal], None]
