"""Read a model's tokenizer from its files, as transformers' AutoTokenizer does.

transformers takes a second to import, and so it is used only for the few tokenizers that it would
change. For all others, ``_read_plain`` reads the same from tokenizer.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# With these classes and model types, transformers uses tokenizer.json as it is.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
PLAIN_TYPES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "")
# With these classes, transformers builds a new tokenizer from the vocabulary and a word pattern.
BUILDING_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", *PLAIN_CLASSES)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
PATTERNS = dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), QWEN2)
PATTERNS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"), QWEN3_5)
# Settings, a folder and files that make transformers do more than read tokenizer.json.
FURTHER_SETTINGS = ("auto_map", "fast_tokenizer_files", "split_special_tokens", "add_prefix_space")
TEMPLATES_FOLDER = "additional_chat_templates"
LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")


class TokenizerError(ValueError):
    """Raised for a model folder without a usable tokenizer. The message names the file."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a tokenizer's files."""

    fast: FastTokenizer
    end_id: int | None
    special_tokens: Mapping[str, str]
    """Maps names such as ``eos_token`` to special tokens. Chat templates get them as variables."""
    templates: str | Mapping[str, str] | None
    """The chat template, or several by name."""

    def template(self, *, for_tools: bool = False) -> str | None:
        """Return the chat template for conversations with or without tools, if any."""
        if not isinstance(self.templates, Mapping):
            return self.templates
        default = self.templates.get("default")
        return self.templates.get("tool_use", default) if for_tools else default


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read a tokenizer's files. Raises TokenizerError."""
    if not (folder / TOKENIZER_FILE).is_file():
        # Without the file, transformers would silently make an empty tokenizer.
        raise TokenizerError(f"{folder / TOKENIZER_FILE}: the file does not exist")
    try:
        return _read_plain(folder) or _read_with_transformers(folder)
    except TokenizerError:
        raise
    except Exception as error:
        # Whatever error the libraries raise, these files are unusable.
        raise TokenizerError(
            f"{folder}: its tokenizer.json and tokenizer_config.json make no tokenizer"
        ) from error


def _read_with_transformers(folder: Path) -> TokenizerFiles:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise TokenizerError(f"{folder / TOKENIZER_FILE}: tokenizer_config.json names another kind")
    return TokenizerFiles(
        loaded.backend_tokenizer,
        loaded.eos_token_id,
        loaded.special_tokens_map,
        loaded.chat_template,
    )


def _read_plain(folder: Path) -> TokenizerFiles | None:
    """Read a tokenizer's files, or return None if transformers might read them differently."""
    config, model = _object(folder / CONFIG_FILE), _object(folder / "config.json")
    legacy = () if "added_tokens_decoder" in config else LEGACY_FILES
    if (
        any(config.get(name) for name in FURTHER_SETTINGS)
        or any((folder / name).exists() for name in (TEMPLATES_FOLDER, *legacy))
        or "model_name" in model
    ):
        return None
    fast = FastTokenizer.from_file(str(folder / TOKENIZER_FILE))
    special_tokens = _special_tokens(fast, config)
    if special_tokens is None or not _is_taken_whole(fast, config, model.get("model_type", "")):
        return None
    templates = config.get("chat_template")
    if isinstance(templates, list):
        templates = {template["name"]: template["template"] for template in templates}
    if (folder / TEMPLATE_FILE).exists():
        templates = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    end = special_tokens.get("eos_token")
    end_id = None if end is None else fast.token_to_id(end)
    return TokenizerFiles(fast, end_id, special_tokens, templates)


def _object(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _special_tokens(fast: FastTokenizer, config: dict[str, Any]) -> dict[str, str] | None:
    """Return special tokens by name. Return None if transformers would add or change some tokens,
    because tokenizer.json and tokenizer_config.json differ."""
    added = {n: token.__getstate__() for n, token in fast.get_added_tokens_decoder().items()}
    declared = config.get("added_tokens_decoder")
    if declared is not None and added != {
        int(n): AddedToken(**token).__getstate__() for n, token in declared.items()
    }:
        return None
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    others = list(config.get("additional_special_tokens") or ())
    if isinstance(further := config.get("extra_special_tokens") or (), dict):
        named |= further
    else:
        others += further
    named = {name: t for name, t in named.items() if t is not None and not isinstance(t, bool)}
    special = {token["content"] for token in added.values() if token["special"]}
    texts = [_text(token) for token in (*named.values(), *others)]
    return dict(zip(named, texts)) if special.issuperset(texts) else None  # noqa: B905


def _text(token: Any) -> Any:
    is_object = isinstance(token, dict) and token.get("__type") == "AddedToken"
    return token["content"] if is_object else token if isinstance(token, str) else None


def _is_taken_whole(fast: FastTokenizer, config: dict[str, Any], model_type: str) -> bool:
    """Return whether transformers would use the tokenizer in tokenizer.json unchanged."""
    kind, model = config.get("tokenizer_class"), fast.model
    if fast.padding is not None or fast.truncation is not None:
        return False
    if kind in PLAIN_CLASSES and model_type in PLAIN_TYPES:
        return True
    pattern = PATTERNS.get(model_type)
    if pattern is None or kind not in BUILDING_CLASSES or not isinstance(model, BPE):
        return False
    size = fast.get_vocab_size(with_added_tokens=False)
    own = fast.get_vocab(with_added_tokens=False)
    added = {t.content: n for n, t in sorted(fast.get_added_tokens_decoder().items())}
    new = [number for token, number in added.items() if token not in own]
    parts = [
        json.loads(part.__getstate__()) if part is not None else {}
        for part in (fast.normalizer, fast.pre_tokenizer, fast.decoder)
    ]
    normalizer, words, decoder = parts
    options = (model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback)
    return (
        {"unk_token", "bos_token", "eos_token", "pad_token"} <= config.keys()
        and new == list(range(size, size + len(new)))
        and normalizer == {"type": "NFC"}
        and decoder.get("type") == "ByteLevel"
        and [step | {"trim_offsets": None} for step in words.get("pretokenizers", ())]
        == _word_steps(pattern)
        and not any((*options, model.ignore_merges))
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    )


def _word_steps(pattern: str) -> list[dict[str, Any]]:
    """Return the steps that cut a text into words, as tokenizer.json would contain them."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return [split | {"invert": False, "trim_offsets": None}, letters | {"trim_offsets": None}]
