from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.bench.models import (
    INTERFERENCE,
    KINDS,
    SERVING,
    TEMPLATE_TOKENS,
    ModelStore,
    weight_bytes,
    write_endless_model,
)
from tests.models import SPECIAL_TOKENS, ModelSpec
from tests.published import Published
from tests.reference import load_model

SPECS = {"serving": SERVING, "interference": INTERFERENCE}
PROMPTS = 8
PROMPT_TOKENS = 20
ANSWER_TOKENS = 24
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module", params=SPECS.values(), ids=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    chosen = request.param
    assert isinstance(chosen, ModelSpec)
    return chosen


@pytest.fixture(scope="module")
def folder(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("endless"), spec)


def greedy_answers(folder: Path, spec: ModelSpec) -> list[list[int]]:
    """To prompts of random tokens."""
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    shape = (PROMPTS, PROMPT_TOKENS)
    tokens = mx.random.randint(0, spec.vocab_size, shape, key=mx.random.key(0))
    answers: list[list[int]] = [[] for _ in range(PROMPTS)]
    for _ in range(ANSWER_TOKENS):
        tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
        for answer, token in zip(answers, np.array(tokens)[:, 0], strict=True):
            answer.append(int(token))
    return answers


def test_the_endless_model_never_ends_and_says_whole_text_only(
    folder: Path, spec: ModelSpec
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    endings = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    for answer in greedy_answers(folder, spec):
        assert not endings & set(answer)
        for token in answer:
            said = tokenizer.decode([token], skip_special_tokens=True)
            assert said, "every token is seen when it is made"
            assert REPLACEMENT not in said, "no half characters"


def test_a_letter_is_a_token_and_the_template_adds_what_it_is_counted_for(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question in ("a", "some words of letters", "x" * 500):
        messages = [{"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(question) + TEMPLATE_TOKENS


# --- the same weights in several forms ---------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", Published(SERVING))


def weights(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def test_all_forms_have_the_same_weights_and_tokenizer(store: ModelStore) -> None:
    plain, wide, packed = store.bfloat16(), store.float32(), store.quantised()
    for name, array in weights(plain).items():
        assert array.dtype == mx.bfloat16
        assert mx.array_equal(array, weights(wide)[name])
        if array.ndim < 2:
            assert mx.array_equal(array, weights(packed)[name])
            continue
        scales, biases = (
            weights(packed)[name.removesuffix("weight") + part] for part in ("scales", "biases")
        )
        restored = mx.dequantize(weights(packed)[name], scales, biases, group_size=64, bits=4)
        assert mx.abs(restored - array).max() < mx.abs(array).max() / 7
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        texts = {(folder / file).read_text() for folder in (plain, wide, packed)}
        assert len(texts) == 1, file


@pytest.mark.parametrize("form", ["bfloat16", "float32", "quantised"])
def test_every_form_is_a_model_that_never_ends(store: ModelStore, form: str) -> None:
    folder = getattr(store, form)()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    endings = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    for answer in greedy_answers(folder, SERVING):
        assert not endings & set(answer)


def test_files_for_llama_cpp_are_made_once_and_whole_or_not_at_all(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def write(model: Path, file: Path) -> None:
        made.append(model)
        file.write_text("a part")
        if len(made) == 1:
            raise ImportError("gguf")

    monkeypatch.setattr("tests.bench.models.write_gguf", write)
    with pytest.raises(ImportError):
        store.gguf()
    assert store.gguf() == store.gguf()
    assert store.gguf_float32().name.endswith("-float32.gguf")
    assert made == [store.bfloat16(), store.bfloat16(), store.float32()]
    assert weight_bytes(store.gguf()) == len("a part")


def test_llama_cpps_own_program_quantises_its_file(store: ModelStore, tmp_path: Path) -> None:
    store.bfloat16()
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\ncat "$1" > "$2"\necho "$3" >> "$2"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.bench.models.write_gguf", lambda _, file: file.write_text("wide "))
        assert store.gguf_quantised(program).read_text() == "wide q4_0\n"
    program.unlink()
    assert store.gguf_quantised(program).is_file(), "it is there already"


def test_of_a_mixture_a_token_does_not_read_all_weights(tmp_path: Path) -> None:
    reads = {name: ModelStore(tmp_path, kind).is_read_whole for name, kind in KINDS.items()}
    assert reads == {"qwen3-0.6b": True, "qwen3.5-0.8b": True, "qwen3-30b-a3b-eighth": False}
