"""Which model a client means."""

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

LATEST = ":latest"
LOADED = "loaded"
"""What a name stands for that means whatever is loaded."""


class ModelNames:
    """The models' own names, and what else clients call them."""

    def __init__(
        self,
        models: Collection[str],
        aliases: Mapping[str, str],
        at_hand: Callable[[], str | None],
    ) -> None:
        """models: a hub id or a folder's name each; they may come and go. aliases: patterns such as
        ``gpt-*``, and the model that each stands for, or LOADED; the first that matches counts.
        at_hand: returns the model that is loaded, or would be the first; None where there is no
        such one."""
        self._models = models
        self._aliases = aliases
        self._at_hand = at_hand

    def find(self, name: str | None) -> str | None:
        """Return the model of that name; None where there is none. name: None stands for the model
        that is at hand."""
        written = (name or "").removesuffix(LATEST).rstrip("/")
        if not written:
            return self._at_hand()
        return self._own(written) or self._meant(written)

    def _own(self, name: str) -> str | None:
        """Return the model with that name. The organisation may be left out where only one model is
        called so without it."""
        if name in self._models:
            return name
        base = name.rpartition("/")[2]
        found = [model for model in self._models if base == model.rpartition("/")[2]]
        whole = [model for model in found if "/" not in name or "/" not in model]
        return whole[0] if len(whole) == 1 else None

    def _meant(self, name: str) -> str | None:
        for pattern, model in self._aliases.items():
            if fnmatchcase(name, pattern):
                return self._at_hand() if model == LOADED else self._own(model)
        return None
