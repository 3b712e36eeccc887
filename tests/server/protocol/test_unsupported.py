import pytest

from server.protocol.unsupported import Api, Unsupported
from server.protocol.wire_errors import ApiError


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("image", "image"),
        ("image_url", "image"),
        ("input_image", "image"),
        ("document", "file"),
        ("file", "file"),
        ("input_file", "file"),
    ],
)
def test_what_is_not_shown_is_noted_and_counted_under_every_name(kind: str, what: str) -> None:
    unsupported = Unsupported("placeholder", "images.chat")
    assert unsupported.note(kind, "here") == f"[{what} not shown: this server reads text only]"
    assert unsupported.count == 1
    refusing = Unsupported("refuse", "images.chat")
    with pytest.raises(ApiError, match=r'images\.chat = "placeholder"') as caught:
        refusing.note(kind, "here")
    assert (caught.value.status, caught.value.param, refusing.count) == (400, "here", 0)


def test_what_is_neither_image_nor_file_is_refused_and_no_setting_would_help() -> None:
    unsupported = Unsupported("placeholder", "images.chat")
    with pytest.raises(ApiError) as caught:
        unsupported.note("input_audio", "here")
    assert "images.chat" not in caught.value.message
    assert (caught.value.param, unsupported.count) == ("here", 0)


@pytest.mark.parametrize("api", ["chat", "ollama"])
def test_apis_without_agents_refuse_what_they_do_not_know(api: Api) -> None:
    with pytest.raises(ApiError):
        Unsupported("placeholder", "images.chat", api).leave_out("compaction", "here")
