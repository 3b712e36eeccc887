"""Facts of a tokenizer that judging forms needs besides the tokenizer itself."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Plain values, that can be sent to another process."""

    size: int
    """Logits of the model's output."""
    stop_ids: list[int]
    """Tokens that end an answer."""
    tags: dict[str, list[int]]
    """The tokens of the tags around calls."""
    names: dict[str, int]
    """Added tokens, as grammars may name them."""

    def to_json(self) -> str:
        """Write them."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "TokenizerFacts":
        """Read what ``to_json`` has written."""
        return cls(**json.loads(text))
