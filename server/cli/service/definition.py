"""What a service runs, whichever manager runs it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcache.user_folders import state_folder
from server.config import Config, SettingError

# What managers wait, beyond the drain, before they kill: last words, and the device's end.
STOP_GRACE_S = 40
# A cluster's processes are given this long to end, after the drain: Ray's, and then once more.
CLUSTER_STOP_GRACE_S = 100
# Between an end that was a failure and the next start.
RESTART_S = 10
# What a user may have set for quire and its downloads, which a manager's own environment lacks.
# Keys are not among them: they belong into the settings file.
KEPT_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
)


class ServiceError(SettingError):
    """The service cannot be installed, removed or asked."""


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """A command and its surroundings. command: begins with an absolute path. folder: for the log,
    and for what is said before there is one."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    stop_timeout_s: int


class Manager(Protocol):
    """What starts services of one user. All of it raises ServiceError."""

    def install(self, definition: ServiceDefinition) -> str:
        """Have it started, now and from now on, in place of an earlier one. Return what to know."""

    def remove(self) -> str:
        """End it and forget it. Return what was done."""

    def status(self) -> str:
        """Return whether it is installed and runs."""


def define(arguments: Sequence[str], settings: Config) -> ServiceDefinition:
    """Define the service that runs ``quire serve`` with these arguments. settings: in force with
    them. Raises ServiceError."""
    arguments = ["serve", *arguments]
    if settings.log.file is None:
        arguments += ["--set", f"log.file={_log_folder() / 'quire.log'}"]
    return _defined(arguments, settings.server.drain_s + STOP_GRACE_S)


def define_head(arguments: Sequence[str], settings: Config) -> ServiceDefinition:
    """Define the service of a cluster's head: ``quire cluster serve --start`` with these arguments.
    settings: in force with them. Raises ServiceError."""
    stop_timeout_s = settings.server.drain_s + CLUSTER_STOP_GRACE_S
    return _defined(["cluster", "serve", "--start", *arguments], stop_timeout_s)


def define_member(head: str, key_file: Path) -> ServiceDefinition:
    """Define the service of another machine of a cluster. Raises ServiceError."""
    joins = ["cluster", "join", head, "--stay", "--key-file", str(key_file)]
    return _defined(joins, CLUSTER_STOP_GRACE_S)


def _defined(arguments: Sequence[str], stop_timeout_s: int) -> ServiceDefinition:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    command = (str(quire_command()), *arguments)
    return ServiceDefinition(command, kept, _log_folder(), stop_timeout_s)


def _log_folder() -> Path:
    try:
        return state_folder() / "log"
    except RuntimeError as error:
        raise ServiceError(f"there is no home folder for a service's log: {error}") from error


def quire_command() -> Path:
    """Return the absolute path of the ``quire`` that runs now. Raises ServiceError."""
    here = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("quire")
    for path in (here if here.name == "quire" else beside, beside):
        if path.is_file():
            return path.absolute()
    found = shutil.which("quire")
    if found is None:
        raise ServiceError("the quire command is not found: install quire where it stays")
    return Path(found).absolute()


def write_definition(file: Path, text: bytes) -> None:
    """Write what a manager reads; only its owner may, since arguments may be secrets. Raises
    ServiceError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(text)
    except OSError as error:
        raise ServiceError(f"{file}: {error.strerror}") from error


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a manager's tool, and return what it said. Raises ServiceError where it is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServiceError(
            f"{command[0]} is not to be had here ({error.strerror}): no service can be installed. "
            "Have what starts your other programs run `quire serve`"
        ) from error


def must_run(*command: str) -> None:
    """Run a manager's tool. Raises ServiceError with what it said where it fails."""
    done = run_tool(*command)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}"
        raise ServiceError(f"{' '.join(command)}: {said}")
