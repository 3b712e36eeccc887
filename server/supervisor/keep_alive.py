"""How long a model stays loaded after its last request."""

import math
from dataclasses import dataclass, field

# Clients that are remembered, of one model; of more, those that want it for longest.
MAX_CLIENTS = 64

NOBODY = b""
"""Stands for whoever loaded a model that no client has used yet."""


@dataclass(slots=True)
class KeepAlive:
    """Until when a model is kept: as long as one of its clients wants it.

    So a client's long time counts, and a short one only where nobody else has used the model since.
    """

    default_s: float
    _until: dict[bytes, float] = field(default_factory=dict)
    """By client."""

    def used(self, client: bytes, now: float, wanted_s: float | None) -> None:
        """Note that a client's request has ended. wanted_s: how long it asks to keep the model
        after it; negative means for ever; None where it asks for nothing."""
        keep_s = self.default_s if wanted_s is None else wanted_s
        self._until.pop(NOBODY, None)
        self._until[client] = math.inf if keep_s < 0 else now + keep_s
        if len(self._until) > MAX_CLIENTS:
            others = self._until.keys() - {client}
            del self._until[min(others, key=self._until.__getitem__)]

    @property
    def until(self) -> float:
        """Return when nobody wants the model any more; 0 where nobody has used it."""
        return max(self._until.values(), default=0.0)

    def forget(self) -> None:
        """Forget all clients: the model is not loaded any more."""
        self._until.clear()
