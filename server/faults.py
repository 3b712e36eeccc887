"""Why a command cannot do its work: one sentence each, and an exit code of its own."""


class StartError(Exception):
    """The server cannot start, or cannot go on; one sentence."""


class SettingError(StartError):
    """Settings that cannot work."""


class ModelError(StartError):
    """A model that cannot be served."""


class EngineError(StartError):
    """The engine failed."""
