"""Prompts with common beginnings, as every server takes them, and their answers."""

import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import metal_ext
from kvcache.layout import KVFormat, KVSpec, choose_page
from tests.bench.load import Answer, Exchange, make_prompt, send
from tests.bench.models import INTERFERENCE
from tests.bench.peers import BrokenError, Server
from tests.bench.programs import Program

SUFFIX_TOKENS = 32
ANSWER_TOKENS = 4
MAX_RUN_S = 90.0
ENCODINGS = 9
FIRST_SEED = 2_000_001


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same tokens as text and as ids: a letter is a token."""

    text: str
    ids: list[int]


class Prompts:
    """No two have a beginning in common by chance."""

    def __init__(self, model: Path) -> None:
        from mlx_lm.tokenizer_utils import load

        self._encode = load(model).encode
        self._seeds = count(FIRST_SEED)

    def family(self, prefix_tokens: int, members: int) -> list[Prompt]:
        """Prompts with a prefix that nobody has had before, and ends of their own."""
        seed = next(self._seeds)
        prefix = make_prompt(seed, 0, prefix_tokens)
        texts = [prefix + make_prompt(seed, n, SUFFIX_TOKENS) for n in range(1, members + 1)]
        return [Prompt(text, list(self._encode(text))) for text in texts]

    def encoding_ms(self, prefix_tokens: int) -> float:
        """What mlx-lm's tokenizer takes for a prompt with such a prefix: the fastest of some."""
        text = make_prompt(0, 0, prefix_tokens + SUFFIX_TOKENS)
        return 1e3 * min(self._seconds(text) for _ in range(ENCODINGS))

    def _seconds(self, text: str) -> float:
        started_s = time.perf_counter()
        self._encode(text)
        return time.perf_counter() - started_s


def whole_blocks(tokens: int) -> int:
    """How many of the first tokens quire shares between the benchmark's prompts."""
    spec = KVSpec(INTERFERENCE.num_key_value_heads, INTERFERENCE.head_dim, KVFormat.FLOAT32)
    block = choose_page(spec, metal_ext.SYSTEM_PAGE_BYTES) // spec.row_bytes
    return tokens // block * block


async def ask(server: Server, prompt: Prompt) -> Answer:
    """The whole answer, a short one."""
    exchange = await start_answer(server, prompt, ANSWER_TOKENS)
    return await exchange.answer(MAX_RUN_S)


async def start_answer(server: Server, prompt: Prompt, max_tokens: int) -> Exchange:
    """Sends ids to who takes them, and text to the others."""
    asked = prompt.ids if takes_ids(server) else prompt.text
    return await send(server.target, server.target.completion(asked, max_tokens))


def takes_ids(server: Server) -> bool:
    """mlx_lm.server encodes every prompt itself."""
    return isinstance(server.program, Program) and server.program.name == "quire"


def check_answer(label: str, answer: Answer, prompt_tokens: int) -> None:
    """Raises BrokenError unless it is whole."""
    if answer.error is not None or answer.ttft_s is None:
        raise BrokenError(f"{label}: a request failed: {answer.error or 'no text'}")
    if answer.prompt_tokens != prompt_tokens:
        raise BrokenError(
            f"{label}: a prompt has {answer.prompt_tokens} tokens, not {prompt_tokens}"
        )


def check_cached(label: str, answer: Answer, cached_tokens: int, *, exactly: bool) -> None:
    """Raises BrokenError when the cache had less of the prompt than it should. exactly: it shares
    whole blocks and nothing else; who does not may find a letter more by chance."""
    had, expected = answer.cached_tokens, cached_tokens
    if exactly:
        expected = whole_blocks(cached_tokens)
    if had < expected or (exactly and had != expected):
        raise BrokenError(f"{label}: the cache had {had} tokens of a prompt, not {expected}")
