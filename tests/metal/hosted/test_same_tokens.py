import pytest

from tests.abuse.processes import SMALL
from tests.abuse.soak import DEMO
from tests.clients.servers import QUIRE
from tests.metal.hosted import same_tokens
from tests.metal.hosted.same_tokens import Expected, difference, main

SERVE = [str(QUIRE), "serve", str(DEMO), "--kv-backend", "posix", *SMALL]
SURE, UNSURE = Expected("a", frozenset("a")), Expected("b", frozenset("bc"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("aba", ""),
        ("aca", ""),
        ("acx", ""),
        ("axa", "token 1 is 'x', and mlx-lm's is 'b'"),
        ("abx", "token 2 is 'x', and mlx-lm's is 'a'"),
        ("ab", "2 tokens, and mlx-lm has 3"),
    ],
)
def test_tokens_differ_where_mlx_lm_is_sure(answer: str, said: str) -> None:
    assert difference(answer, [SURE, UNSURE, SURE]) == said


def test_a_server_that_says_what_mlx_lm_says_is_good_and_another_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(str(DEMO), "", SERVE) == 0
    assert "of 12 answers are mlx-lm's to the end" in capsys.readouterr().out
    right = same_tokens.tokens_of
    monkeypatch.setattr(same_tokens, "tokens_of", lambda url, ids: right(url, ids[:-1]))
    assert main(str(DEMO), "", SERVE) == 1
    assert "prompt 0, alone: token 0 is" in capsys.readouterr().out
