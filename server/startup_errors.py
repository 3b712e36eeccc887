"""Start-up errors: why a command cannot do its work, one sentence and one exit code each."""

from typing import ClassVar


class StartError(Exception):
    """The server cannot start, or cannot go on; one sentence."""

    exit_code: ClassVar[int]


class EngineError(StartError):
    """The engine failed."""

    exit_code = 1


class SettingError(StartError):
    """Settings that cannot work."""

    exit_code = 2


class ModelError(StartError):
    """A model that cannot be served."""

    exit_code = 3


class SubstrateFailedError(EngineError):
    """The GPU's memory of K and V failed, which is remembered: a next start takes another."""

    exit_code = 4


def engine_error(lost: bool, reason: str = "the engine has failed: see the log") -> EngineError:
    """Make the error that says why there is no engine. lost: whether a GPU's memory of K and V has
    failed."""
    if not lost:
        return EngineError(reason)
    return SubstrateFailedError(
        f"{reason}; the GPU's memory of K and V has failed, and from the next start on something "
        "else serves, until `quire doctor` finds that it works again"
    )
