"""A server's parts are made of what it keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.client import EngineClient
from engine.types import EngineDeadError, QueueFullError, SamplingParams
from server.protocol.wire_errors import ApiError
from server.routes.service import Service
from tests.server.streams import PreparedClient, PreparedStream, new_times, prompt_of


@pytest.mark.parametrize(
    ("refusal", "status"), [(QueueFullError(), 429), (EngineDeadError(), 503)], ids=str
)
def test_what_fills_up_or_ends_while_a_prompt_is_encoded_is_refused_as_well(
    service: Service, refusal: Exception, status: int
) -> None:
    class Refusing(PreparedClient):
        def submit(self, *_: Any, **__: Any) -> Sequence[PreparedStream]:
            raise refusal

    prompt = prompt_of((1,), SamplingParams(max_tokens=1))
    with pytest.raises(ApiError) as caught:
        replace(service, client=cast(EngineClient, Refusing([]))).answering.start(
            prompt, times=new_times()
        )
    assert caught.value.status == status
