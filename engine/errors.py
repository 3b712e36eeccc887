"""Errors of requests that the engine refuses or cannot finish, and of the engine itself."""

FORM_LIMITS = "the answer's form has come to its limits"
"""How the message of a request begins that ended with a FormLimitError."""


class QueueFullError(Exception):
    """No room for so many requests now."""


class ShareFullError(QueueFullError):
    """There is room, but none for more of the same tenant."""


class PromptTooLongError(Exception):
    """A prompt that can never fit."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"{prompt_tokens} prompt tokens, {max_model_len} at most")
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class FormLimitError(Exception):
    """An answer's form cannot be followed any further, for a reason that lies in the form: fixed
    words, fit for clients."""


class EngineDeadError(Exception):
    """The engine has ended; nothing can be generated any more."""


class EngineStuckError(Exception):
    """The engine's thread hangs in a step."""


class EngineFailedError(RuntimeError):
    """Steps fail again and again, or the device is lost."""
