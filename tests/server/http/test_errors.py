import json

import pytest

from server.http.errors import error_response
from server.protocol.wire_errors import overloaded


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x"])
def test_anthropics_paths_have_anthropics_errors(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    body = json.loads(bytes(response.body))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert body["type"] == "error"
    assert body["error"]["type"] == "rate_limit_error"
    assert body["request_id"].startswith("req_")


@pytest.mark.parametrize("path", ["/api/chat", "/api/pull", "/api/"])
def test_ollamas_paths_have_ollamas_errors(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    assert json.loads(bytes(response.body)) == {"error": "The queue is full; try again later."}
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1", "/", "/api", "/apis/chat"])
def test_all_others_have_openais(path: str) -> None:
    response = error_response({"path": path, "headers": []}, overloaded())
    assert json.loads(bytes(response.body))["error"]["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"
    assert "request-id" not in response.headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/models"])
def test_where_both_apis_have_a_path_a_header_tells_them_apart(path: str) -> None:
    for headers, kind in (([], "error"), ([(b"anthropic-version", b"2023-06-01")], "type")):
        response = error_response({"path": path, "headers": headers}, overloaded())
        assert next(iter(json.loads(bytes(response.body)))) == kind
