"""Errors in OpenAI's format."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from engine.types import FORM_LIMITS

MAX_NAMED_PROBLEMS = 3
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_NAME_CHARS = 200
# Value of the header Retry-After if no better estimate of the wait is known.
RETRY_AFTER_S = 1
# The engine's reason for ending requests at shutdown.
SHUTTING_DOWN = "the server is shutting down"
# A cluster ends requests for these reasons. Clients may send such requests again.
REPLICA_LOST = "the replica that answered is gone"
REPLICAS_FULL = "all replicas are full"


class ApiError(Exception):
    """An error that becomes the response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {message, type, param, code}}``."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def late_fields(self) -> dict[str, int]:
        """Fields that replace an error's headers within a stream: ``retry_after_s``, if known."""
        after = self.headers.get("Retry-After")
        return {} if after is None else {"retry_after_s": int(after)}

    def late_body(self) -> dict[str, Any]:
        """Return the body with ``late_fields``, as the last event of a stream."""
        body = self.body()
        body["error"] |= self.late_fields
        return body


def quoted(name: str) -> str:
    """Quote a name that a client sent, for an error message. Cut the name to MAX_NAME_CHARS."""
    return repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "...")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def check_count(count: int, max_count: int, what: str, param: str | None = None) -> None:
    """Raise ApiError (400) if the count exceeds the maximum. ``what`` is the plural noun of the
    counted things, and the default of ``param``."""
    if count > max_count:
        raise invalid(f"There are {count} {what}; at most {max_count} are read.", param or what)


class ContextOverflowError(ApiError):
    """The 400 for a prompt that can never fit, in words by which agents recognize this error."""

    def __init__(
        self,
        tokens: int,
        max_model_len: int,
        param: str,
        reason: str = "",
        *,
        estimated: bool = False,
    ) -> None:
        """``tokens`` is the prompt's length. ``reason`` is a sentence for the client."""
        self.tokens = tokens
        self.max_model_len = max_model_len
        self.estimated = estimated
        super().__init__(
            400,
            f"This model's maximum context length is {max_model_len} tokens, and at least one of "
            f"them is for the answer. However, your {param} resulted in "
            f"{_tokens(tokens, estimated)}. {reason or 'Please shorten it.'}",
            param=param,
            code="context_length_exceeded",
        )
        self.reason = reason

    def because_of_tools(self, num_tools: int, tools_tokens: int) -> "ContextOverflowError":
        assert self.param is not None
        share = f"{'about ' if self.estimated else ''}{tools_tokens}"
        reason = f"Of these the definitions of its {num_tools} tools are {share}: offer fewer."
        return ContextOverflowError(
            self.tokens, self.max_model_len, self.param, reason, estimated=self.estimated
        )

    @property
    def anthropic_message(self) -> str:
        """The message in words by which Anthropic's clients recognize this error. Claude Code reads
        both numbers."""
        counts = f"{self.tokens} tokens > {self.max_model_len - 1} maximum"
        return ". ".join(filter(None, (f"prompt is too long: {counts}", self.reason)))


def _tokens(tokens: int, estimated: bool) -> str:
    return f"about {tokens} tokens" if estimated else f"{tokens} tokens"


def input_too_long(
    tokens: int, max_model_len: int, param: str, *, estimated: bool = False
) -> ApiError:
    """Make the 400 for a text that can never fit, at endpoints that generate nothing."""
    return invalid(
        f"This model's maximum context length is {max_model_len} tokens; your {param} has "
        f"{_tokens(tokens, estimated)}. Please shorten it.",
        param,
        "context_length_exceeded",
    )


def too_many_tokens(max_tokens: int, param: str) -> ApiError:
    return invalid(
        f"The texts of your {param} have more than {max_tokens} tokens together; send fewer at a "
        "time.",
        param,
        "too_many_values",
    )


class UnknownModelError(ApiError):
    """The 404 for a model that this server does not have."""

    def __init__(self, name: str, near: str | None = None) -> None:
        """near: the name of a model that this server has and the client may have meant."""
        hint = f"did you mean {quoted(near)}? " if near else ""
        super().__init__(
            404,
            f"The model {quoted(name)} does not exist here; {hint}GET /v1/models lists those that "
            "do.",
            type="not_found_error",
            param="model",
            code="model_not_found",
        )
        self.ollama_message = f"model {quoted(name)} not found"
        """The message by which Ollama's clients recognize this error."""


def come_back(status: int, message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Make a 429 or 503 error with the header Retry-After."""
    return ApiError(
        status,
        f"{message}; try again later.",
        type="rate_limit_error" if status == 429 else "server_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def body_too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="server_error", code="unavailable")


def shutting_down() -> ApiError:
    """Make the 503 at shutdown. Closing the connection lets clients reach another server."""
    error = come_back(503, "The server is shutting down", "shutting_down")
    error.headers["Connection"] = "close"
    return error


def generation_failed(reason: str, what: str = "Generation") -> ApiError:
    """Return the error for an engine's reason: 503 if the server shuts down or replicas are lost or
    full, 400 if the grammar of the answer has hit a limit, and 500 for any other reason."""
    if reason == SHUTTING_DOWN:
        return shutting_down()
    if reason in (REPLICA_LOST, REPLICAS_FULL):
        code = "replica_lost" if reason == REPLICA_LOST else "replicas_full"
        return come_back(503, f"{what} failed: {reason}", code)
    if reason.startswith(FORM_LIMITS):
        return invalid(f"{what} failed: {reason}.", code="form_limits")
    return internal_error(f"{what} failed: {reason}.")


def internal_error(message: str = "The server failed to answer.") -> ApiError:
    """Make the 500 error, with a header that forbids clients to retry."""
    return ApiError(
        500,
        message,
        type="server_error",
        code="internal_error",
        headers={"X-Should-Retry": "false"},
    )


def from_validation(error: ValidationError, body: bytes = b"") -> ApiError:
    """Make the 400 for an invalid parameter. The error never quotes the request's ``body``."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        unreadable = invalid(f"The body cannot be read. {first['msg']}.", code="invalid_json")
        return (_half_a_character(body) if "hex escape" in first["msg"] else None) or unreadable
    named = "; ".join(
        f"{_place(problem['loc']) or 'body'}: {problem['msg']}"
        for problem in problems[:MAX_NAMED_PROBLEMS]
    )
    return invalid(named, _place(first["loc"]) or None, "invalid_value")


def _half_a_character(body: bytes) -> ApiError | None:
    """Make the 400 for a text with half of a surrogate pair, or return None if there is none.

    JSON allows such text (RFC 8259, section 8.2), Unicode does not. pydantic's reader rejects it
    without naming the parameter."""
    try:
        root = json.loads(body)
    except (ValueError, RecursionError):
        return None
    place: list[int | str] = []
    waiting: list[Iterator[tuple[Any, Any]]] = [iter([("", root)])]
    while waiting:
        key, value = next(waiting[-1], (None, None))
        if key is None:
            waiting.pop()
            del place[-1:]
        elif isinstance(value, dict | list):
            place.append(key)
            waiting.append(iter(value.items() if isinstance(value, dict) else enumerate(value)))
        elif isinstance(value, str) and SURROGATE.search(value):
            name = _place((*place, key))
            return invalid(f"{name}: half of a surrogate pair is no text", name, "invalid_value")
    return None


def _place(location: tuple[int | str, ...]) -> str:
    """Write ("messages", 0, "content") as messages[0].content, without names of union branches."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in TYPE_NAMES:
            place += f".{part}" if place else part
    return place


# Names in pydantic's error locations that stand for branches of unions.
TYPE_NAMES = frozenset({"str", "int", "float", "bool", "none", "list", "dict"})
