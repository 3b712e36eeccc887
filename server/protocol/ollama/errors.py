"""Errors as Ollama's clients expect them."""

from typing import Any

from server.protocol.wire_errors import ApiError, UnknownModelError


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return ``{"error": message}``. There is no place for the parameter but the message."""
    message = error.message
    if isinstance(error, UnknownModelError):
        message = error.ollama_message
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"error": message}
