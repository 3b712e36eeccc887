"""Why a model cannot answer now."""

from server.protocol.wire_errors import ApiError, come_back

# Of reasons: some repeat what a model's files have.
MAX_REASON_CHARS = 2000


class LoadError(Exception):
    """A model was not loaded; the reason is a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:MAX_REASON_CHARS])


class NoAnswerError(Exception):
    """A model's process has ended before its answer, or does not answer."""

    def __init__(self, *, unasked: bool) -> None:
        """unasked: whether it had ended before it was asked."""
        super().__init__("the model's process does not answer")
        self.unasked = unasked


class NoRoomError(Exception):
    """All memory is in use by others."""

    def __init__(self, retry_after_s: int) -> None:
        """retry_after_s: when to ask again."""
        super().__init__("other models have the memory, and are in use")
        self.retry_after_s = retry_after_s


def no_room(model: str, error: NoRoomError) -> ApiError:
    """Make the 503 for a model that others leave no memory."""
    message = f"There is no memory for {model} now: {error}"
    return come_back(503, message, "no_memory_for_model", error.retry_after_s)


def not_loaded(model: str, error: LoadError) -> ApiError:
    """Make the 503 for a model that did not start."""
    message = f"The model {model} was not loaded: {error}"
    return come_back(503, message, "model_not_loaded")


def still_loading(model: str) -> ApiError:
    """Make the 503 for a model that takes longer to load than a request waits."""
    message = f"The model {model} is still being loaded"
    return come_back(503, message, "model_loading")


def model_ended(model: str) -> ApiError:
    """Make the 503 for an answer whose model has ended."""
    message = f"The process of {model} has ended before its answer"
    return come_back(503, message, "model_ended")
