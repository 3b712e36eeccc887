"""Counts the tokens of a sequence, for penalties."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenCounts:
    """Distinct tokens of a sequence in order of first sight, counted as the sequence grows.

    ``ids[i]`` was generated ``generated[i]`` times; 0 means that only the prompt has it.
    """

    ids: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)
    _seen: int = 0

    def update(self, token_ids: list[int], num_prompt: int) -> None:
        """Take in what was appended to ``token_ids`` since the last call."""
        for position in range(self._seen, len(token_ids)):
            token = token_ids[position]
            slot = self._slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.generated.append(0)
            if position >= num_prompt:
                self.generated[slot] += 1
        self._seen = len(token_ids)
