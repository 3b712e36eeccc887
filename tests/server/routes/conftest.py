"""What tests of several routes want to see."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.client import TokenStream
from engine.types import Request
from tests.server.harness import Engine


@pytest.fixture
def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine is asked from now on."""
    requests: list[Request] = []
    submit = engine.client.submit_choices

    def noted(*arguments: Any, **options: Any) -> Sequence[TokenStream]:
        streams = submit(*arguments, **options)
        requests.extend(stream.request for stream in streams)
        return streams

    monkeypatch.setattr(engine.client, "submit_choices", noted)
    return requests
