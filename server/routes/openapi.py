"""Decides to which API a path belongs, and makes the OpenAPI schema.

Routes declare their bodies with ``openapi_extra=takes(Model)``. FastAPI adds the other fields. All
paths of an API have the same errors. https://spec.openapis.org/oas/v3.1.0"""

from functools import cache

from starlette.datastructures import Headers
from starlette.types import Scope

from server.protocol.answers import Json
from server.protocol.common import WireModel

SHARED = "#/components/schemas/"
ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"
SHARED_PATHS = ("/v1/models", "/models")
ANTHROPIC_HEADER = "anthropic-version"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT: Json = {"type": "string", "minLength": 1}
TEXT_OR_NULL: Json = {"type": ["string", "null"]}
ERRORS: Json = {
    "OpenAIError": _object(
        error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)
    ),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=TEXT, message=TEXT), request_id=TEXT
    ),
    "OllamaError": _object(error=TEXT),
}


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if a request is for Anthropic's API. The path decides. Some paths are also paths
    of OpenAI's API. There, a header decides: Anthropic's clients always send it."""
    path: str = scope["path"]
    if path.startswith(SHARED_PATHS):
        return ANTHROPIC_HEADER in Headers(scope=scope)
    return path.startswith(ANTHROPIC_PATHS)


def speaks_ollama(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith(OLLAMA_PATHS)


def takes(model: type[WireModel], stream: str = EVENTS) -> Json:
    """Return a route's OpenAPI fields: the request's body, and the answer's content types."""
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
    """Return a model's schema. The schema is cached, so callers must not change it."""
    # Names of definitions get a prefix, since two bodies may use equal names.
    return model.model_json_schema(ref_template=f"{SHARED}{model.__name__}.{{model}}")


def completed(schema: Json) -> Json:
    """Move the bodies' definitions into shared components. Replace FastAPI's errors by ours."""
    components = dict(ERRORS)
    for path, operations in schema["paths"].items():
        name = "AnthropicError" if path.startswith(ANTHROPIC_PATHS) else "OpenAIError"
        name = "OllamaError" if path.startswith(OLLAMA_PATHS) else name
        content = {"application/json": {"schema": {"$ref": SHARED + name}}}
        failure = {"description": "What is wrong, and how to mend it.", "content": content}
        for operation in operations.values():
            for media in operation.get("requestBody", {}).get("content", {}).values():
                parts = media["schema"].pop("$defs", {})
                owner = media["schema"]["title"]
                components |= {
                    f"{owner}.{part}": schema_of_part for part, schema_of_part in parts.items()
                }
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": failure, "5XX": failure}
    schema["components"] = {"schemas": components}
    return schema
