import pytest

from server.protocol.chat.continuation import ContinuationFields
from server.protocol.wire_errors import ApiError
from server.text.conversation import Turn

LAST = Turn("assistant", "Once")


@pytest.mark.parametrize(
    ("asked", "marked", "continues"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"continue_final_message": False, "add_generation_prompt": True}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
        ({"add_generation_prompt": False}, True, True),
    ],
)
def test_the_message_or_the_request_says_that_it_is_continued(
    asked: dict[str, bool], marked: bool, continues: bool
) -> None:
    fields = ContinuationFields.model_validate(asked)
    assert fields.continues(LAST, marked=marked) is continues
    fields.check_answered(continues=continues)


@pytest.mark.parametrize(
    ("asked", "last", "param"),
    [
        ({"continue_final_message": True}, Turn("user", "Hi"), "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            LAST,
            "add_generation_prompt",
        ),
        ({"add_generation_prompt": False}, LAST, "add_generation_prompt"),
    ],
)
def test_what_contradicts_itself_is_refused(asked: dict[str, bool], last: Turn, param: str) -> None:
    fields = ContinuationFields.model_validate(asked)
    with pytest.raises(ApiError) as caught:
        fields.check_answered(continues=fields.continues(last, marked=False))
    assert caught.value.param == param
