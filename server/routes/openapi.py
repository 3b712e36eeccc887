"""The OpenAPI schema, from the wire models that the routes parse bodies with.

A route says with ``openapi_extra=takes(Model)`` what its body is; the rest is the same for all.
https://spec.openapis.org/oas/v3.1.0
"""

from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Scope

from server.protocol.common import WireModel

Json = dict[str, Any]

SHARED = "#/components/schemas/"
OPENAI_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string", "minLength": 1},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string", "minLength": 1},
                "message": {"type": "string", "minLength": 1},
            },
        },
        "request_id": {"type": "string", "minLength": 1},
    },
}
OLLAMA_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "minLength": 1}},
}
ERRORS = {
    "OpenAIError": OPENAI_ERROR,
    "AnthropicError": ANTHROPIC_ERROR,
    "OllamaError": OLLAMA_ERROR,
}
ANTHROPIC_PATHS = "/v1/messages"
OLLAMA_PATHS = "/api/"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
SHARED_PATHS = ("/v1/models", "/models")
ANTHROPIC_HEADER = "anthropic-version"


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API: by its path, or, where both APIs have the
    path, by the header that Anthropic's clients always send."""
    path: str = scope["path"]
    if path.startswith(SHARED_PATHS):
        return ANTHROPIC_HEADER in Headers(scope=scope)
    return path.startswith(ANTHROPIC_PATHS)


def speaks_ollama(scope: Scope) -> bool:
    """Return whether a request is one of Ollama's API."""
    path: str = scope["path"]
    return path.startswith(OLLAMA_PATHS)


def takes(model: type[WireModel], stream: str = EVENTS) -> Json:
    """Return what a route with that body adds to its operation: the body, and that answers are
    JSON, or what a stream is made of where the body may ask for one."""
    answers: Json = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in model.model_fields:
        answers[stream] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": _schema_of(model)}}}
    return {
        "requestBody": body,
        "responses": {"200": {"description": "The answer.", "content": answers}},
    }


@cache
def _schema_of(model: type[WireModel]) -> Json:
    """Make the schema of a model once, because that takes longer than all else of an application.
    It must not be changed."""
    # Models of different bodies may have the same name.
    return model.model_json_schema(ref_template=f"{SHARED}{model.__name__}.{{model}}")


class DescribedApp(FastAPI):
    """An application whose schema tells bodies and errors as they are."""

    def openapi(self) -> Json:
        """Return the schema, which is made on the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def _completed(schema: Json) -> Json:
    """Move what the bodies share to where it can be referred to, and name the errors."""
    # FastAPI describes its own errors, which no route here answers.
    components: Json = dict(ERRORS)
    for path, operations in schema["paths"].items():
        error = _error_of(path)
        for operation in operations.values():
            for media in operation.get("requestBody", {}).get("content", {}).values():
                parts = media["schema"].pop("$defs", {})
                owner = media["schema"]["title"]
                components |= {f"{owner}.{name}": part for name, part in parts.items()}
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": _failure(error), "5XX": _failure(error)}
    schema["components"] = {"schemas": components}
    return schema


def _error_of(path: str) -> str:
    if path.startswith(OLLAMA_PATHS):
        return "OllamaError"
    return "AnthropicError" if path.startswith(ANTHROPIC_PATHS) else "OpenAIError"


def _failure(error: str) -> Json:
    content = {"application/json": {"schema": {"$ref": SHARED + error}}}
    return {"description": "What is wrong, and how to mend it.", "content": content}
