import pytest

from engine.types import SamplingParams
from server.protocol.wire_errors import ApiError
from server.text.tokenizer import Tokenizer
from tests.server.harness import make_service, start_engine

NOBODY = b""


def test_answers_that_never_fit_are_refused_and_those_that_do_not_now_are_put_off(
    tokenizer: Tokenizer,
) -> None:
    engine = start_engine(max_num_seqs=1, max_queue=2)
    admission = make_service(engine.client, tokenizer).admission
    admission.check_answers(NOBODY, 3)
    with pytest.raises(ApiError) as caught:
        admission.check_answers(NOBODY, 4)
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert (
        caught.value.message == "n is 4; this server has room for 3 answers to one client at most."
    )
    with pytest.raises(ApiError) as caught:
        admission.check_answers(NOBODY, 1, prompts=4)
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    admission.check_answers(NOBODY, 1, prompts=3)
    engine.client.submit((1, 2), SamplingParams(max_tokens=9))
    admission.check_answers(NOBODY, 2)
    admission.check_answers(NOBODY, 1, prompts=2)
    for choices, prompts in ((3, 1), (1, 3)):
        with pytest.raises(ApiError) as caught:
            admission.check_answers(NOBODY, choices, prompts)
        assert caught.value.status == 429
    engine.stop()
