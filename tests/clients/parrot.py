"""A model that says what it is told to say, served: ``python -m tests.clients.parrot``.

After a message ``Repeat after me:`` it says the rest of that message, whatever tokens these are:
thoughts, calls of tools, broken calls. After the answer of a tool it says that answer. So a client
may have any text parsed and streamed to it, as a model that chose to say it would have it.

What was asked it reads back from the cache's K, slot by slot, as RecallModel does: many may ask at
the same time, and a prefix that came from the cache is as good as a computed one.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.client import EngineClient
from kvcache.views import KVViews
from server.cli.log import configure_log
from server.config import Config, ServerSection
from server.http.listener import reserve
from server.http.server import listen
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.clients.models import tokenizer_only
from tests.engines import BLOCK_BYTES, VOCAB, recall_client
from tests.recall import DIGIT_BASE, DIGITS, RecallModel, region_of
from tests.server.harness import ids_of, make_service, token_id

MARK = "Repeat after me:"
NOTHING_TO_REPEAT = "You did not tell me what to say."
ANSWER_BEGINS = "<|im_start|>assistant\n"
NO_REASONING = "<think>\n\n</think>\n\n"
SURE = 100.0
"""A logit that no temperature and no penalty makes improbable."""
MAX_MODEL_LEN = 16384
BLOCKS = 4096
STOP_TIMEOUT_S = 10.0

NextToken = Callable[[list[int]], int | None]
"""The token that follows these; None where it does not matter."""


@dataclass
class ToldModel(RecallModel):
    """RecallModel that asks what to say next."""

    next_token: NextToken = field(default=lambda _: None)

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        logits = super().hidden(token_ids, views, rows)
        return None if logits is None else logits * SURE

    def _recalled(self, views: KVViews, segment: int, position: int) -> int:
        told = self.next_token(self._read_back(views, segment, position))
        return super()._recalled(views, segment, position) if told is None else told

    @staticmethod
    def _read_back(views: KVViews, segment: int, position: int) -> list[int]:
        """The sequence, as the keys of the first layer have it."""
        region = region_of(views, 0, "keys", segment)
        digits = region.reshape(region.shape[0], -1)[: position + 1, 2 + DIGITS : 2 + 2 * DIGITS]
        found = np.array(digits.astype(mx.float32)).astype(np.int64)
        tokens: list[int] = (found @ DIGIT_BASE ** np.arange(DIGITS)).tolist()
        return tokens


class Parrot:
    """What is said next, for sequences of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, answer_to: Callable[[str], str] | None = None) -> None:
        """answer_to: what a rendered conversation is answered, if not what it tells to say."""
        self._tokenizer = tokenizer
        self._answer = answer_to or told_answer
        self._begins = ids_of(tokenizer, ANSWER_BEGINS)
        self._no_thoughts = ids_of(tokenizer, NO_REASONING)
        self._end = token_id(tokenizer, "<|im_end|>")
        self._answer_to = lru_cache(256)(self._make_answer)

    def __call__(self, tokens: list[int]) -> int | None:
        """None for what is no conversation."""
        start = _last_place(tokens, self._begins)
        if start is None:
            return None
        if tokens[start : start + len(self._no_thoughts)] == self._no_thoughts:
            start += len(self._no_thoughts)
        answer = self._answer_to(tuple(tokens[:start]))
        said = len(tokens) - start
        return answer[said] if said < len(answer) else self._end

    def _make_answer(self, prompt: tuple[int, ...]) -> list[int]:
        text = self._tokenizer.fast.decode(list(prompt), skip_special_tokens=False)
        return ids_of(self._tokenizer, self._answer(text))


def told_answer(prompt: str) -> str:
    """What a rendered conversation tells to say."""
    last = prompt.split("<|im_start|>")[-2]
    if found := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last, re.DOTALL):
        return ", ".join(found)
    told = last.partition(MARK)[2]
    return told.removesuffix("\n").removesuffix("<|im_end|>").strip() or NOTHING_TO_REPEAT


def _last_place(tokens: list[int], part: list[int]) -> int | None:
    """Where the last occurrence of a part ends."""
    for end in range(len(tokens), len(part) - 1, -1):
        if tokens[end - len(part) : end] == part:
            return end
    return None


def told_engine(next_token: NextToken, **changes: Any) -> EngineClient:
    """A started engine around ToldModel; stop it when done. changes: fields of EngineConfig."""
    sizes: dict[str, Any] = {
        "model_max_len": MAX_MODEL_LEN,
        "max_model_len": MAX_MODEL_LEN,
        "kv_budget_bytes": BLOCKS * BLOCK_BYTES,
        "max_num_batched_tokens": 1024,
        "prefix_keep_s": 600.0,
        "check_every_step": False,
    }
    return recall_client(
        model=lambda shape, vocab: ToldModel(shape, vocab, next_token=next_token),
        **(sizes | changes),
    )


def told_service(client: EngineClient, tokenizer: Tokenizer, config: Config) -> Service:
    """A service whose answers end where the model ends a turn."""
    end = token_id(tokenizer, "<|im_end|>")
    return make_service(client, tokenizer, config, stop_token_ids=frozenset({end}))


def main() -> None:
    """Serves on a free port until told to end."""
    settings = Config(server=ServerSection(port=0))
    configure_log(settings.log)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tokenizer_only(Path(folder), VOCAB))
    client = told_engine(Parrot(tokenizer))
    try:
        with reserve(settings.server.host, settings.server.port) as listener:
            listen(settings, told_service(client, tokenizer, settings), listener)
    finally:
        client.stop(STOP_TIMEOUT_S)


if __name__ == "__main__":
    main()
