"""Serves a model, and compares its greedy tokens with mlx-lm's.

    python -m tests.metal.hosted.same_tokens MODEL KIND... -- COMMAND...

MODEL is a folder or a name on the hub, and COMMAND serves it (serve_and_ask.py), from each KIND of
memory in turn. mlx-lm computes on the CPU, since a virtual machine's GPU may not. Both compute in
16 bits, in another order: where mlx-lm's two best tokens are as good as equal, either may come, and
what follows is not compared. The exit code is 0 when nothing else differs.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.generate import generate_step

from tests.metal.hosted.serve_and_ask import ANSWER_S, excuse, get, serve_and_ask

NEW_TOKENS = 48
# Of log-probabilities: apart by less, both tokens are right.
TIE = 0.15
# Of a distribution: those that may be as good as the best.
CANDIDATES = 4
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Wer anderen eine Grube gräbt,",
    "Memory is paged: " + "a page table maps addresses to frames, and " * 60,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """A token that mlx-lm says, by its text, and those that are as good."""

    text: str
    as_good: frozenset[str]


def greedy(model: Any, tokenizer: Any, ids: list[int]) -> list[Expected]:
    """What mlx-lm says to a prompt, with the token that ends its answer."""
    said = []
    steps = generate_step(mx.array(ids), model, mx.default_stream(mx.cpu), max_tokens=NEW_TOKENS)
    for token, logprobs in steps:
        best = np.array(mx.argsort(-logprobs)[:CANDIDATES]).tolist()
        near = [other for other in best if (logprobs[token] - logprobs[other]).item() < TIE]
        text = tokenizer.decode([token])
        said.append(Expected(text, frozenset(map(tokenizer.decode, ([one] for one in near)))))
        if token in tokenizer.eos_token_ids:
            break
    return said


def difference(answer: Sequence[str], expected: Sequence[Expected]) -> str:
    """Where the first wrong token is, in words; "" where there is none."""
    for at, (got, wanted) in enumerate(zip(answer, expected, strict=False)):
        if got == wanted.text:
            continue
        if got in wanted.as_good:
            return ""
        return f"token {at} is {got!r}, and mlx-lm's is {wanted.text!r}"
    if len(answer) != len(expected):
        return f"{len(answer)} tokens, and mlx-lm has {len(expected)}"
    return ""


def tokens_of(url: str, ids: list[int]) -> list[str]:
    """The texts of the tokens that the server says to a prompt."""
    body = {"prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 0}
    (choice,) = json.loads(get(f"{url}/v1/completions", body, ANSWER_S))["choices"]
    tokens: list[str] = choice["logprobs"]["tokens"]
    return tokens


def main(model_name: str, kinds: list[str], command: list[str]) -> int:
    """The exit code."""
    mx.set_default_device(mx.Device(mx.cpu))
    model, tokenizer, *_ = load(model_name)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    expected = [greedy(model, tokenizer, ids) for ids in prompts]

    def compare(url: str) -> None:
        alone = [tokens_of(url, ids) for ids in prompts]
        with ThreadPoolExecutor(len(prompts)) as clients:
            together = list(clients.map(lambda ids: tokens_of(url, ids), prompts))
        wrong = [
            f"prompt {number}, {company}: {what}"
            for company, answers in (("alone", alone), ("together", together))
            for number, answer in enumerate(answers)
            if (what := difference(answer, expected[number]))
        ]
        if wrong:
            raise RuntimeError("; ".join(wrong))
        same = sum(
            answer == [token.text for token in wanted]
            for answer, wanted in zip(alone + together, expected * 2, strict=True)
        )
        print(f"{same} of {2 * len(prompts)} answers are mlx-lm's to the end, the others to a tie")

    codes = [
        serve_and_ask([*command, "--kv-backend", kind], excuse(kind), compare) for kind in kinds
    ]
    return max(codes)


if __name__ == "__main__":
    cut = sys.argv.index("--")
    sys.exit(main(sys.argv[1], sys.argv[2:cut], sys.argv[cut + 1 :]))
