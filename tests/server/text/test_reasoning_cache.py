from engine.types import PrefixSalt
from server.text.conversation import Channel, ToolCall, Turn
from server.text.pieces import AnswerPiece, Delta, TextPiece, ToolCallArguments, ToolCallStart
from server.text.reasoning_cache import KeyOfAnswer, ReasoningCache
from tests.server.harness import talk

SALT = PrefixSalt(b"tenant", b"")
ASKED = Turn("user", "Hello")


def answered(cache: ReasoningCache, *pieces: AnswerPiece, asked: Turn = ASKED) -> None:
    new_recorder = cache.recall(talk(asked), SALT).new_recorder
    assert new_recorder is not None
    gathered = new_recorder()
    for piece in pieces:
        gathered.observe(Delta([piece]))
    gathered.observe(Delta(finish="stop"))


def reasoning(cache: ReasoningCache, turn: Turn) -> str:
    """Of a turn that follows the question."""
    return cache.recall(talk(ASKED, turn), SALT).conversation.turns[1].reasoning


def test_thoughts_are_gathered_and_white_space_around_an_answer_says_nothing() -> None:
    cache = ReasoningCache(1000)
    pieces = [
        (Channel.REASONING, "H"),
        (Channel.REASONING, "m."),
        (Channel.CONTENT, "Ye"),
        (Channel.CONTENT, "s.\n"),
    ]
    answered(cache, *(TextPiece(channel, text) for channel, text in pieces))
    assert reasoning(cache, Turn("assistant", " Yes.")) == "Hm."
    assert reasoning(cache, Turn("assistant", "No.")) == ""
    assert reasoning(cache, Turn("user", "Yes.")) == ""
    assert reasoning(cache, Turn("assistant", "Yes.", "Own.")) == "Own."


def test_an_answer_with_calls_is_found_by_its_first_one_whatever_it_says() -> None:
    cache = ReasoningCache(1000)
    calls: list[AnswerPiece] = [
        ToolCallStart(0, "a", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "b", "f"),
    ]
    answered(cache, TextPiece(Channel.REASONING, "Hm."), TextPiece(Channel.CONTENT, "So."), *calls)
    made = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    assert reasoning(cache, Turn("assistant", "", tool_calls=made)) == "Hm."
    assert reasoning(cache, Turn("assistant", "So.", tool_calls=made[1:])) == ""
    assert reasoning(cache, Turn("assistant", "So.")) == ""


def test_what_was_not_thought_or_not_said_is_not_kept() -> None:
    cache = ReasoningCache(1000)
    answered(cache, TextPiece(Channel.REASONING, "Hm."), TextPiece(Channel.CONTENT, " "))
    assert reasoning(cache, Turn("assistant")) == ""
    answered(cache, TextPiece(Channel.CONTENT, "Yes."))
    assert reasoning(cache, Turn("assistant", "Yes.")) == ""


def test_what_goes_on_with_an_answer_is_not_gathered() -> None:
    begun = talk(ASKED, Turn("assistant", "Well"))
    assert ReasoningCache(1000).recall(begun, SALT).new_recorder is None


def test_keys_tell_apart_what_only_joins_to_the_same() -> None:
    keys = set()
    for turns in (("ab", "c"), ("a", "bc"), ("abc",), ("", "abc")):
        key_of = KeyOfAnswer(SALT)
        for text in turns:
            key_of.add_turn(Turn("user", text))
        keys.add(key_of("Yes.", ""))
    assert len(keys) == 4
