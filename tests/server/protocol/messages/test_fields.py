"""Whatever Anthropic's own client may send has its rule; test_fields.py holds the table itself."""

import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsStreaming as BetaParams,
)
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming

from server.protocol.fields import SAMPLING_FIELDS, Rule
from server.protocol.messages.request import MESSAGES_FIELDS, CountTokensRequest

NAMES = {row.name for row in MESSAGES_FIELDS}
# A header, and two of betas that take what follows from other servers than this one.
NO_FIELDS = {"betas", "billing_policy", "fallback_credit_token"}


@pytest.mark.parametrize(
    "params", [MessageCreateParamsStreaming, MessageCountTokensParams, BetaParams]
)
def test_every_field_of_anthropics_client_has_its_rule(params: type) -> None:
    assert set(params.__annotations__) - NO_FIELDS <= NAMES


def test_what_is_refused_of_a_chat_is_refused_here() -> None:
    refused = {row.name for row in SAMPLING_FIELDS if row.rule is Rule.REFUSED}
    assert refused <= {row.name for row in MESSAGES_FIELDS if row.rule is Rule.REFUSED}


def test_what_counts_is_accepted_by_both_paths() -> None:
    accepted = {row.name for row in MESSAGES_FIELDS if row.rule is Rule.ACCEPTED}
    assert set(CountTokensRequest.model_fields) <= accepted
