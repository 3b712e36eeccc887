"""What tests of several routes want to see."""

import pytest

from engine.types import Request
from tests.server.harness import Engine, recorded


@pytest.fixture
def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine is asked from now on."""
    requests, noted = recorded(engine)
    monkeypatch.setattr(engine.client, "submit", noted)
    return requests
