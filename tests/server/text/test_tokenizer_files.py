"""What is read without transformers is what transformers reads, and the rest is left to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from server.text.tokenizer_files import QWEN2, QWEN3_5, TokenizerFiles, read_tokenizer
from tests.models import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, write_sentencepiece_tokenizer

Files = dict[str, Any]
Edit = Callable[[Files], object]
CONFIG, TOKENIZER, MODEL = "tokenizer_config.json", "tokenizer.json", "config.json"
TEXTS = ["a b", "naïve e\u0301 😀 can't 1234\n\n x", "<|im_start|>user\nHello<|im_end|>\n", ""]
TEXTS += ["a<think>b</think>  c", "\u0e01\u0e33 नमस्ते", "<|im_end|> <tool_call>{}"]


@pytest.fixture(scope="module")
def written() -> Files:
    """The files of a model like Qwen3: byte-level BPE, with words of Qwen's pattern."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "Ġ"), ("Ġ", "a"), ("l", "l"), ("e", "ll"), ("'", "t"), ("1", "2")]
    words = [*alphabet, *dict.fromkeys(map("".join, merges))]
    fast = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    fast.add_tokens([AddedToken(t, normalized=False) for t in PLAIN_ADDED_TOKENS])
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": "{{ messages }}",
    }
    return {CONFIG: config, TOKENIZER: json.loads(fast.to_str()), MODEL: {"model_type": "qwen3"}}


def settings(file: str = CONFIG, **values: Any) -> Edit:
    return lambda files: files[file].update(values)


def both(*edits: Edit) -> Edit:
    return lambda files: [edit(files) for edit in edits]


def declare(files: Files, **changes: Any) -> None:
    added = {str(token["id"]): token for token in files[TOKENIZER]["added_tokens"]}
    added = {n: {k: v for k, v in t.items() if k != "id"} | changes for n, t in added.items()}
    files[CONFIG]["added_tokens_decoder"] = added


def cut_by(pattern: str) -> Edit:
    def edit(files: Files) -> None:
        split = files[TOKENIZER]["pre_tokenizer"]["pretokenizers"][0]
        split["pattern"] = {"Regex": pattern}

    return edit


def add_later(files: Files) -> None:
    token = files[TOKENIZER]["added_tokens"][-1]
    files[TOKENIZER]["added_tokens"].append(token | {"id": token["id"] + 7, "content": "<later>"})


def as_objects(files: Files) -> None:
    token = files[TOKENIZER]["added_tokens"][0] | {"__type": "AddedToken"}
    token.pop("id")
    files[CONFIG] |= {"pad_token": token, "image_token": token, "eos_token": "<|im_end|>"}


LEGACY = {
    "added_tokens.json": {"<new>": 900},
    "special_tokens_map.json": {"bos_token": "<|im_end|>"},
}
PLAIN = settings(tokenizer_class="PreTrainedTokenizerFast")
AS_QWEN3_5 = both(settings(MODEL, model_type="qwen3_5"), cut_by(QWEN3_5))
TEMPLATES = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]

ALIKE: dict[str, Edit] = {
    "qwen2": settings(MODEL, model_type="qwen2"),
    "qwen3": settings(),
    "fast": settings(tokenizer_class="Qwen2TokenizerFast"),
    "qwen2 of another class": both(settings(MODEL, model_type="qwen2"), PLAIN),
    "qwen3.5": AS_QWEN3_5,
    "qwen3.5 of another class": both(AS_QWEN3_5, settings(tokenizer_class="TokenizersBackend")),
    "plain": PLAIN,
    "plain, other words": both(PLAIN, cut_by("[a-z]+")),
    "llama": both(settings(MODEL, model_type="llama"), PLAIN, cut_by("[^ ]+")),
    "no config.json": both(lambda files: files.pop(MODEL), PLAIN),
    "declared": declare,
    "declared, with legacy files": both(declare, lambda files: files.update(LEGACY)),
    "objects": as_objects,
    "named": settings(extra_special_tokens={"image_token": "<|im_start|>"}),
    "no end": settings(eos_token=None),
    "several templates": settings(chat_template=TEMPLATES),
    "no template": settings(chat_template=None),
    "template in a file": lambda files: files.update({"chat_template.jinja": "{{ 'é' }}"}),
    "numbers with gaps, as they are": both(PLAIN, add_later),
}  # fmt: skip
LEFT: dict[str, Edit] = {
    "other words": cut_by("[a-z]+"),
    "words of another family": cut_by(QWEN3_5),
    "no pattern": lambda files: files[TOKENIZER].update(pre_tokenizer=None),
    "not normalised": lambda files: files[TOKENIZER].update(normalizer=None),
    "options": lambda files: files[TOKENIZER]["model"].update(ignore_merges=True),
    "suffix": lambda files: files[TOKENIZER]["model"].update(end_of_word_suffix="</w>"),
    "padded": lambda files: files[TOKENIZER].update(
        padding={"strategy": {"Fixed": 3}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}),
    "declared otherwise": lambda files: declare(files, lstrip=True),
    "new token": settings(mask_token="<mask>"),
    "new tokens": settings(additional_special_tokens=["<mask>"]),
    "new extra tokens": settings(extra_special_tokens=["<mask>"]),
    "not special": settings(unk_token="<think>"),
    "no pad": lambda files: files[CONFIG].pop("pad_token"),
    "legacy": lambda files: files.update(LEGACY),
    "more templates": lambda files: files.update({"additional_chat_templates/x.jinja": "x"}),
    "split": settings(split_special_tokens=True),
    "prefix space": settings(add_prefix_space=True),
    "class unknown": settings(tokenizer_class="MyTokenizer"),
    "no class": lambda files: files[CONFIG].pop("tokenizer_class"),
    "no settings": lambda files: files.pop(CONFIG),
    "another type": settings(MODEL, model_type="mistral"),
    "a name": settings(MODEL, model_name="internlm2"),
}  # fmt: skip


def write(folder: Path, written: Files, edit: Edit) -> None:
    files = json.loads(json.dumps(written))
    edit(files)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that are left to transformers."""
    read, folders = AutoTokenizer.from_pretrained, list[Path]()

    def noted(folder: Path, **how: Any) -> Any:
        folders.append(folder)
        return read(folder, **how)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noted)
    return folders


def read_with_transformers(folder: Path) -> TokenizerFiles:
    made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    templates, end_id = made.chat_template, made.eos_token_id
    return TokenizerFiles(made.backend_tokenizer, end_id, made.special_tokens_map, templates)


@pytest.mark.parametrize("name", [*ALIKE, *LEFT])
def test_a_tokenizer_is_the_one_that_transformers_makes(
    tmp_path: Path, written: Files, name: str, left: list[Path]
) -> None:
    write(tmp_path, written, (ALIKE | LEFT)[name])
    ours = read_tokenizer(tmp_path)
    assert left == [tmp_path] * (name in LEFT)
    theirs = read_with_transformers(tmp_path)
    assert ours.end_id == theirs.end_id
    assert ours.special_tokens == theirs.special_tokens
    for for_tools in (False, True):
        assert ours.template(for_tools=for_tools) == theirs.template(for_tools=for_tools)
    added = [
        {n: token.__getstate__() for n, token in each.fast.get_added_tokens_decoder().items()}
        for each in (ours, theirs)
    ]
    assert added[0] == added[1]
    assert ours.fast.get_vocab() == theirs.fast.get_vocab()
    for ends in (False, True):
        ids = [[e.ids for e in each.fast.encode_batch(TEXTS, add_special_tokens=ends)]
               for each in (ours, theirs)]  # fmt: skip
        assert ids[0] == ids[1]
    for text in TEXTS:
        numbers = ours.fast.encode(text).ids
        assert ours.fast.decode(numbers) == theirs.fast.decode(numbers)


def test_bonsai_2_has_the_words_of_qwen3_5(tmp_path: Path, written: Files) -> None:
    write(tmp_path, written, both(AS_QWEN3_5, settings(MODEL, model_type="prism_hadamard_qwen35")))
    own = Tokenizer.from_file(str(tmp_path / TOKENIZER))
    assert read_tokenizer(tmp_path).fast.to_str() == own.to_str()


def test_a_sentencepiece_tokenizer_of_llama_is_left_to_transformers(
    tmp_path: Path, left: list[Path]
) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    (tmp_path / MODEL).write_text('{"model_type": "llama"}')
    file = tmp_path / CONFIG
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
    )
    read_tokenizer(tmp_path)
    assert left == [tmp_path]


def test_the_patterns_are_those_of_transformers() -> None:
    assert QWEN2 == tokenization_qwen2.PRETOKENIZE_REGEX
    assert QWEN3_5 == tokenization_qwen3_5.PRETOKENIZE_REGEX
