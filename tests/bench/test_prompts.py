from dataclasses import replace

import pytest

from tests.bench.load import Answer
from tests.bench.models import INTERFERENCE
from tests.bench.peers import BrokenError
from tests.bench.prompts import Prompts, check_answer, check_cached, whole_blocks
from tests.models import write_tokenizer

WHOLE = Answer(1.0, 3.0, (2.0,), 288, 4, "length", None, cached_tokens=256)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, INTERFERENCE.vocab_size)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return Prompts(folder)


def test_a_family_has_one_prefix_that_no_other_has(prompts: Prompts) -> None:
    one, other = prompts.family(64, 3), prompts.family(64, 3)
    assert {len(prompt.ids) for prompt in one + other} == {96}
    assert len({tuple(prompt.ids[:64]) for prompt in one}) == 1
    assert len({tuple(prompt.ids[64:]) for prompt in one}) == 3
    assert one[0].ids[:16] != other[0].ids[:16]


def test_a_letter_is_a_token(prompts: Prompts) -> None:
    (prompt,) = prompts.family(8, 1)
    repeated = [prompt.text.index(letter) for letter in prompt.text]
    assert [prompt.ids.index(number) for number in prompt.ids] == repeated


def test_blocks_are_shared_whole() -> None:
    assert [whole_blocks(tokens) for tokens in (63, 64, 65, 4096)] == [0, 64, 64, 4096]


def test_whole_answers_are_accepted() -> None:
    check_answer("ours", WHOLE, 288)
    check_cached("ours", WHOLE, 256, exactly=True)
    check_cached("theirs", replace(WHOLE, cached_tokens=257), 256, exactly=False)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (replace(WHOLE, error="no answer"), "ours: a request failed: no answer"),
        (replace(WHOLE, text_times_s=()), "ours: a request failed: no text"),
        (replace(WHOLE, prompt_tokens=287), "ours: a prompt has 287 tokens, not 288"),
    ],
)
def test_other_answers_are_not(answer: Answer, says: str) -> None:
    with pytest.raises(BrokenError, match=says):
        check_answer("ours", answer, 288)


@pytest.mark.parametrize("exactly", [True, False])
def test_a_miss_is_no_hit(exactly: bool) -> None:
    with pytest.raises(BrokenError, match="the cache had 192 tokens of a prompt, not 256"):
        check_cached("ours", replace(WHOLE, cached_tokens=192), 256, exactly=exactly)


def test_quire_may_not_say_more_than_it_has() -> None:
    with pytest.raises(BrokenError, match="the cache had 256 tokens of a prompt, not 0"):
        check_cached("ours", WHOLE, 0, exactly=True)
