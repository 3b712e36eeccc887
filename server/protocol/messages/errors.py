"""Errors as Anthropic's clients expect them."""

from typing import Any

from server.protocol.wire_errors import ApiError, ContextOverflowError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {type, message}, "request_id"}``. There is no place for
    the parameter but the message."""
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if isinstance(error, ContextOverflowError):
        message = error.anthropic_message
    elif error.param is not None and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    return {
        "type": "error",
        "error": {"type": TYPES.get(error.status, otherwise), "message": message},
        "request_id": request_id,
    }


def late_message_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the same with ``ApiError.late_fields``, as the last event of a stream has it."""
    body = message_error(error, request_id)
    body["error"] |= error.late_fields
    return body
