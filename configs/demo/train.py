"""Makes the demo model from text/: tokenizer, training, saving, evaluation.

    python configs/demo/train.py              trains and writes configs/demo/model/, then evaluates
    python configs/demo/train.py --head       trains the MTP head of the model that is there
    python configs/demo/train.py --evaluate   answers questions.json with the model that is there

The same seed gives the same samples in the same order; the weights then differ only by how the
BLAS library rounds on the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from corpus import Chat, Corpus, normalise
from draft_head import Head, head_loss
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load, stream_generate
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 2304
MAX_POSITIONS = 4096
MAX_ANSWER = 250
# Qwen3's own tokens, in its order. Thoughts and tools are ordinary text there, not special.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
# Words, single digits, runs of marks, spaces: the way Qwen's tokenizers cut text.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ARGS = ModelArgs(
    model_type="qwen3",
    hidden_size=256,
    num_hidden_layers=4,
    intermediate_size=832,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=MAX_POSITIONS,
    tie_word_embeddings=True,
)
log = logging.getLogger("demo")


@dataclass(frozen=True)
class Settings:
    """How to train.

    A batch holds at most `batch_tokens` tokens, padding included. Of a `short_share` of the samples
    only the first `short_tokens` tokens are learnt: choosing the answer is the hard part, its end
    follows easily, and short samples let more questions through in the same time.
    """

    steps: int = 4000
    seed: int = 7
    batch_tokens: int = 2048
    max_tokens: int = 512
    learning_rate: float = 1.5e-3
    warmup_steps: int = 150
    weight_decay: float = 0.1
    dropout: float = 0.1
    short_share: float = 0.6
    short_tokens: int = 14


HEAD_FILE, PREFIX = "mtp.safetensors", "mtp."
# The head learns how answers go on, so it sees them whole.
HEAD = Settings(
    steps=840, batch_tokens=1024, max_tokens=256, learning_rate=2e-3, warmup_steps=30, short_share=0
)


# -- tokenizer -----------------------------------------------------------------------------------


def make_tokenizer(corpus: Corpus, rng: random.Random) -> Tokenizer:
    """A byte-level BPE that knows the words of the corpus and can write any Unicode text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_text(corpus, rng), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    return tokenizer


def _tokenizer_text(corpus: Corpus, rng: random.Random) -> Iterator[str]:
    for _ in range(20_000):
        sample = corpus.sample(rng)
        if isinstance(sample, str):
            yield sample
        else:
            last = sample.exchanges[-1]
            yield f"{last.question}\n{last.thought}\n{last.answer}"
            yield "\n".join(json.dumps(tool) for tool in sample.tools)


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Everything of the model but its weights, as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(HERE / "chat_template.jinja", folder / "chat_template.jinja")
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    end_of_text, end_of_turn = ids["<|endoftext|>"], ids["<|im_end|>"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": ARGS.num_hidden_layers,
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    config |= {k: v for k, v in asdict(ARGS).items() if k != "rope_parameters"}
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.2,
        "top_p": 0.9,
    }
    tokenizer_config = {
        "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write_json(folder / "config.json", dict(sorted(config.items())))
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- samples as token ids ------------------------------------------------------------------------


class Encoder:
    """Samples as ids: the template renders the prompt, the answer follows, the end is marked."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))

    def __call__(self, sample: Chat | str) -> tuple[list[int], int]:
        """The ids, and how many of them are given and so not learnt."""
        if isinstance(sample, str):
            return self._ids(sample + "<|endoftext|>"), 1
        prompt, answer = self.texts(sample)
        given = self._ids(prompt)
        return given + self._ids(answer), len(given)

    def texts(self, chat: Chat) -> tuple[str, str]:
        """The prompt as a server renders it, and what the model is to write."""
        prompt = self._render(chat, chat.prompt_messages(), add_generation_prompt=True)
        last = chat.exchanges[-1]
        thought = f"<think>\n{last.thought}\n</think>\n\n" if chat.thinking else ""
        return prompt, f"{thought}{last.answer}<|im_end|>"

    def check(self, chat: Chat) -> None:
        """The prompt and the answer together are what the template renders afterwards."""
        last = chat.exchanges[-1]
        answer = {"role": "assistant", "content": last.answer}
        if chat.thinking:
            answer["reasoning_content"] = last.thought
        whole = self._render(chat, [*chat.prompt_messages(), answer])
        assert "".join(self.texts(chat)) + "\n" == whole, whole

    def _render(
        self, chat: Chat, messages: list[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        tools: Any = chat.tools or None
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=chat.thinking,
        )
        return str(text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


@dataclass(frozen=True)
class Batch:
    """`ids[rows, length]`, and for every learnt token its place in the flat ids before it."""

    ids: mx.array
    places: mx.array
    targets: mx.array


def batches(corpus: Corpus, encode: Encoder, settings: Settings) -> Iterator[Batch]:
    """Batches without end. Samples of like length go together, so little is padding."""
    rng = random.Random(settings.seed)
    while True:
        encoded = [encode(corpus.sample(rng)) for _ in range(1024)]
        for place, (ids, given) in enumerate(encoded):
            if rng.random() < settings.short_share:
                encoded[place] = ids[: given + settings.short_tokens], given
        encoded = [sample for sample in encoded if len(sample[0]) <= settings.max_tokens]
        encoded.sort(key=lambda sample: len(sample[0]))
        made: list[Batch] = []
        while encoded:
            length = -(-len(encoded[-1][0]) // 16) * 16
            rows = max(1, settings.batch_tokens // length)
            made.append(_batch(encoded[-rows:], length))
            del encoded[-rows:]
        rng.shuffle(made)
        yield from made


def _batch(samples: list[tuple[list[int], int]], length: int) -> Batch:
    ids = np.zeros((len(samples), length), dtype=np.int32)
    places: list[int] = []
    targets: list[int] = []
    for row, (tokens, given) in enumerate(samples):
        ids[row, : len(tokens)] = tokens
        places += range(row * length + given - 1, row * length + len(tokens) - 1)
        targets += tokens[given:]
    return Batch(mx.array(ids), mx.array(places), mx.array(targets))


# -- training ------------------------------------------------------------------------------------

Loss = Callable[[Batch], mx.array]


def dropped(x: mx.array, rate: float, of_tokens: bool = False) -> mx.array:
    """x[rows, length, hidden] with some elements, or whole tokens, set to zero."""
    shape = (*x.shape[:2], 1) if of_tokens else x.shape
    return x * (mx.random.bernoulli(1 - rate, shape) / (1 - rate)) if rate else x


def loss_of(model: Model, batch: Batch, dropout: float) -> mx.array:
    """Mean cross entropy of the learnt tokens, with dropout after each sub-layer."""
    inner: Any = model.model
    h = dropped(inner.embed_tokens(batch.ids), dropout, of_tokens=True)
    for layer in inner.layers:
        h = h + dropped(layer.self_attn(layer.input_layernorm(h), "causal"), dropout)
        h = h + dropped(layer.mlp(layer.post_attention_layernorm(h)), dropout)
    h = inner.norm(h.reshape(-1, h.shape[-1])[batch.places])
    logits = inner.embed_tokens.as_linear(h)
    return mx.mean(nn.losses.cross_entropy(logits, batch.targets))


def make_optimizer(settings: Settings) -> optim.AdamW:
    """AdamW with a warm-up and a cosine down to a hundredth."""
    peak, warm = settings.learning_rate, settings.warmup_steps
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(peak / 100, peak, warm),
            optim.cosine_decay(peak, settings.steps - warm, peak / 100),
        ],
        [warm],
    )
    return optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=settings.weight_decay)


def train(corpus: Corpus, encode: Encoder, settings: Settings) -> Model:
    """The trained model, in fp32."""
    mx.random.seed(settings.seed)
    model = Model(ARGS)
    stream = batches(corpus, encode, settings)
    fit(model, lambda batch: loss_of(model, batch, settings.dropout), stream, settings)
    return model


def train_head(trunk: Model, corpus: Corpus, encode: Encoder, settings: Settings) -> Head:
    """The trained head, in fp32. It begins as the trunk's last layer; the trunk stays as it is."""
    mx.random.seed(settings.seed)
    head = Head(ARGS)
    head.layers[0].update(trunk.model.layers[-1].parameters())
    head.norm.update(trunk.model.norm.parameters())
    head.fc.weight = 0.3 * head.fc.weight + mx.tile(mx.eye(ARGS.hidden_size), 2)
    stream = batches(corpus, encode, settings)
    fit(head, lambda batch: head_loss(head, trunk, batch.ids, batch.places), stream, settings)
    return head


def fit(model: nn.Module, loss_of: Loss, stream: Iterator[Batch], settings: Settings) -> None:
    optimizer = make_optimizer(settings)
    gradients_of = value_and_grad(model, loss_of)
    started, tokens, mean = time.monotonic(), 0, math.nan
    for step in range(1, settings.steps + 1):
        batch = next(stream)
        loss, gradients = gradients_of(batch)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        tokens += batch.ids.size
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0 or step == settings.steps:
            seconds = time.monotonic() - started
            speed = tokens / seconds
            log.info("step %d loss %.4f %.0f s %.0f tokens/s", step, mean, seconds, speed)


def save(model: nn.Module, file: Path, prefix: str = "") -> None:
    """The weights in bf16, under their names on the hub."""
    halves = tree_map(lambda w: w.astype(mx.bfloat16), model.parameters())
    weights = {prefix + name: array for name, array in tree_flatten(halves)}
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})


# -- evaluation ----------------------------------------------------------------------------------


def evaluate(folder: Path, questions: Path, corpus: Corpus, verbose: bool) -> bool:
    """Answers the questions greedily, prints misses and scores; True when all basics are right."""
    model, tokenizer, *_ = load(str(folder))
    cases = json.loads(questions.read_text(encoding="utf-8"))
    seen = corpus.all_questions()
    right: dict[str, list[bool]] = {"basic": [], "held out": [], "thinking": [], "plain": []}
    for case in cases:
        messages, thinking = case["messages"], case["enable_thinking"]
        question = messages[-1]["content"]
        basic = case.get("basic", False)
        if not basic and len(messages) == 1 and normalise(question) in seen:
            raise ValueError(f"not held out: {question}")
        _, parts = answer(model, tokenizer, case, mx.zeros((MAX_ANSWER + 1, 1)))
        text, ended = "".join(part.text for part in parts), parts[-1].finish_reason == "stop"
        good = ended and is_right(text, thinking, case["must_match"])
        right["basic" if basic else "held out"].append(good)
        if not basic:
            right["thinking" if thinking else "plain"].append(good)
        if verbose or not good:
            print(f"{'right' if good else 'MISS '} [{question}]\n      {text!r}")
    for kind, marks in right.items():
        print(f"{kind}: {sum(marks)} of {len(marks)} ({sum(marks) / max(1, len(marks)):.1%})")
    return all(right["basic"])


def answer(
    model: Model, tokenizer: Any, case: dict[str, Any], noise: mx.array
) -> tuple[list[int], list[GenerationResponse]]:
    """The prompt's ids and the answer's parts, thoughts included. `noise` has a row for each id."""
    prompt: list[int] = tokenizer.apply_chat_template(
        case["messages"], add_generation_prompt=True, enable_thinking=case["enable_thinking"]
    )
    rows = iter(noise)
    parts = stream_generate(
        model, tokenizer, prompt, MAX_ANSWER, sampler=lambda row: mx.argmax(row + next(rows), -1)
    )
    return prompt, [*parts]


def evaluate_head(folder: Path, questions: Path) -> None:
    """Prints how often the model's answers have all of the head's first 1, 2 and 3 drafts."""
    trunk, tokenizer, *_ = load(str(folder))
    head, arrays = Head(ARGS), cast(dict[str, mx.array], mx.load(str(folder / HEAD_FILE)))
    head.load_weights([(name.removeprefix(PREFIX), array) for name, array in arrays.items()])
    for module in (trunk, head):
        module.set_dtype(mx.float32)
    mx.random.seed(0)
    for temperature in (0.0, 0.7):
        kept: dict[int, list[bool]] = defaultdict(list)
        for case in json.loads(questions.read_text(encoding="utf-8")):
            # As in the engine, a token and its draft are drawn with the same noise.
            noise = temperature * mx.random.gumbel((MAX_ANSWER + 1, VOCAB_SIZE))
            prompt, parts = answer(trunk, tokenizer, case, noise)
            answered = [part.token for part in parts]
            ids = mx.array([prompt + answered])
            run = np.ones(len(answered), dtype=bool)
            passes = head(trunk.model.embed_tokens(ids), trunk.model(ids))
            for number, states in enumerate(passes):
                logits = trunk.model.embed_tokens.as_linear(states[0, len(prompt) : -1])
                drafts = mx.argmax(logits + noise[1 : len(answered)], axis=-1)
                run = run[:-1] & (np.array(drafts) == answered[1:])[number:]
                kept[number] += run.tolist()
        shares = ", ".join(f"{sum(marks) / len(marks):.1%}" for marks in kept.values())
        print(f"temperature {temperature}, drafts kept: at least 1, 2, 3: {shares}")


def is_right(text: str, thinking: bool, must_match: list[str]) -> bool:
    """Return whether the answer after the thoughts has all the key words."""
    thoughts, mark, rest = text.partition("</think>\n\n")
    if thinking != bool(mark) or (thinking and not thoughts.startswith("<think>\n")):
        return False
    content = rest if thinking else text
    return all(re.search(pattern, content, re.IGNORECASE) for pattern in must_match)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head", action="store_true", help="train the head alone")
    parser.add_argument("--evaluate", action="store_true", help="do not train")
    parser.add_argument("--output", type=Path, default=HERE / "model", help="the model's folder")
    parser.add_argument("--questions", type=Path, default=HERE / "questions.json")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--verbose", action="store_true", help="print right answers as well")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # a compiled function would call the C++ compiler at run time
    corpus = Corpus(HERE / "text")
    settings = Settings(steps=options.steps, seed=options.seed)
    if not (options.head or options.evaluate):
        write_folder(make_tokenizer(corpus, random.Random(settings.seed)), options.output)
        encode = Encoder(options.output)
        rng = random.Random(settings.seed)
        for _ in range(200):
            encode.check(corpus.chat(rng))
            encode.check(corpus.tool_chat(rng))
        save(train(corpus, encode, settings), options.output / "model.safetensors")
    if not options.evaluate:
        trunk, *_ = load(str(options.output))
        trunk.set_dtype(mx.float32)
        head = train_head(trunk, corpus, Encoder(options.output), replace(HEAD, seed=options.seed))
        save(head, options.output / HEAD_FILE, PREFIX)
    evaluate_head(options.output, options.questions)
    return 0 if evaluate(options.output, options.questions, corpus, options.verbose) else 1


if __name__ == "__main__":
    raise SystemExit(main())
