"""One server for those that leave nothing behind in it."""

from collections.abc import AsyncIterator

import pytest

from server.text.tokenizer import Tokenizer
from tests.abuse.servers import Abused, abused
from tests.server.conftest import app as app
from tests.server.conftest import engine as engine
from tests.server.conftest import http as http
from tests.server.conftest import service as service
from tests.server.conftest import shared_engine as shared_engine
from tests.server.conftest import tokenizer as tokenizer


@pytest.fixture
async def shared_abused(tokenizer: Tokenizer) -> AsyncIterator[Abused]:
    async with abused(tokenizer) as server:
        yield server
