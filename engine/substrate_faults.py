"""Records faults of the memory of K and V at once, because no engine survives them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcache.backend import BackendFailedError


@dataclass(frozen=True, slots=True)
class SubstrateFaults:
    """The faults of one engine."""

    require: Callable[[], object] = lambda: None
    """Raises BackendFailedError where something has failed already. Any thread."""
    remember: Callable[[str], None] = lambda _: None
    """Told of a fault, in half a sentence."""

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Record faults of what runs steps."""
        try:
            yield
        except BackendFailedError as error:
            self.remember(f"serving failed: {error}")
            raise

    def find(self) -> BackendFailedError | None:
        """Return what a step may hang behind. Any thread."""
        try:
            with self.noticed():
                self.require()
        except BackendFailedError as error:
            return error
        return None
