import pytest

from server.text.special_tokens import ESCAPE, MARK, SpecialTokens, pieces_of

END = "<|im_end|>"


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ((END,), f"a{END}{END}b"),
        ((END,), f"<|im{END}_end|>"),
        (("aa",), "aaaaa"),
        (("ab", "ba"), "aba"),
        (("abc", "bc"), "abcbc"),
        ((END,), f"{MARK}{END}{MARK}{MARK}{ESCAPE}{MARK}"),
        ((END, "x"), "xxx"),
        ((), END),
    ],
)
def test_no_piece_of_a_text_spells_a_token_and_all_of_them_are_the_text(
    contents: tuple[str, ...], text: str
) -> None:
    pieces = pieces_of(SpecialTokens(contents).guarded_text(text))
    assert "".join(pieces) == text
    # One of a single character cannot be cut.
    assert not [one for piece in pieces for one in contents if len(one) > 1 and one in piece]


def test_a_text_without_any_is_one_piece() -> None:
    assert pieces_of(SpecialTokens((END,)).guarded_text("<|im_end")) == ["<|im_end"]


def test_all_texts_of_a_value_are_guarded() -> None:
    value = {END: [END, 1, None, True, {"a": END}]}
    guarded = f"<{MARK}|im_end|>"
    found = SpecialTokens((END,)).guarded(value)
    assert found == {guarded: [guarded, 1, None, True, {"a": guarded}]}
