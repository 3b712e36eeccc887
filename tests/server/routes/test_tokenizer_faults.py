"""A tokenizer that fails: a text is to blame, or a bug; the engine hears of neither."""

import httpx2
import pytest

from server.routes.service import Service
from server.text.encoder import Encoder
from tests.server.harness import CHAT, COMPLETIONS, chat, prompt

PROMPTS = {
    CHAT: chat(),
    COMPLETIONS: prompt(),
    "/v1/messages": chat(max_tokens=5),
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}


@pytest.fixture
def never(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine must not be asked."""

    def submit(*_: object, **__: object) -> None:
        raise AssertionError("the engine was reached")

    monkeypatch.setattr(service.client, "submit", submit)


@pytest.mark.parametrize("path", PROMPTS)
async def test_fault_13_a_tokenizer_that_raises_is_a_bug_that_is_told_in_the_apis_shape(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, never: None, path: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("TextInputSequence must be str, not secret")

    monkeypatch.setattr(Encoder, "encode", broken)
    response = await http.post(path, json=PROMPTS[path])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "The server failed to answer."
    assert "secret" not in response.text
