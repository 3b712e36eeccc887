"""Small models whose templates have Qwen3's tools, for the clients' servers."""

import json
from pathlib import Path

from tests.models import write_model, write_tokenizer

TEMPLATE = Path(__file__).parents[2] / "configs" / "demo" / "chat_template.jinja"
THOUGHTS_OFF = "{%- set enable_thinking = enable_thinking is defined and enable_thinking -%}\n"


def random_model(folder: Path) -> Path:
    """Write a model of random weights: only a grammar gives its answers a form. Its template thinks
    only on request, as the thoughts of such a model do not end."""
    return with_template(write_model(folder), THOUGHTS_OFF + TEMPLATE.read_text())


def tokenizer_only(folder: Path, vocab_size: int) -> Path:
    """Write the tokenizer of a model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab_size)
    return with_template(folder, TEMPLATE.read_text())


def with_template(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(settings))
    return folder
