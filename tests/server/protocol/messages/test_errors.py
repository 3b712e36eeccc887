import pytest

from server.protocol.messages.answer import message_error
from server.protocol.wire_errors import ApiError, invalid


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_the_type_is_that_of_the_status(status: int, kind: str) -> None:
    assert message_error(ApiError(status, "No."), "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "No."},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("message", "said"),
    [("It is not.", "tools[0].name: It is not."), ("tools[0].name: no", "tools[0].name: no")],
)
def test_the_parameter_is_named_once(message: str, said: str) -> None:
    found = message_error(invalid(message, "tools[0].name"), "req_1")
    assert found["error"]["message"] == said
