"""``quire service``: have launchd or systemd start quire for one user. See launchd.plist(5),
launchctl(1), systemd.service(5), systemd.unit(5), systemctl(1)."""

import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.user_folders import config_folder, state_folder
from server.cli.cluster_folder import cluster_folder, read_key, write_private
from server.cli.settings import flags_of, read_settings, with_further
from server.config import SettingError

# Seconds from the end of server.drain_s until launchd or systemd kills quire: quire needs them to
# write the end of its log and to free the GPU.
STOP_GRACE_S = 40
# STOP_GRACE_S of a cluster's service: longer, because Ray tries twice to end its processes.
CLUSTER_STOP_GRACE_S = 100
# Seconds from a failure of quire until launchd or systemd starts quire again.
RESTART_S = 10
# Variables that the service takes over from the installing shell. Keys and tokens are left out.
KEPT_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "LMSTUDIO_HOME"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
)
# Name of the file for a service's output under launchd; systemd writes to its journal.
OUTPUT_FILE = "service.err"
LABEL = "org.quire.serve"
# Seconds between two checks whether launchd has forgotten an agent that is ending.
FREE_POLL_S = 0.5
# launchctl's exit codes if an agent has not ended yet: EIO, EINPROGRESS and EALREADY.
STILL_ENDING = (5, 36, 37)
STATE = re.compile(r"^\tstate = (.+)$", re.MULTILINE)
LAST_EXIT = re.compile(r"^\tlast exit code = (.+)$", re.MULTILINE)
UNIT = "quire.service"
USER = ("systemctl", "--user")
# systemd restarts quire any number of times, RestartSec apart, but not after exit codes 2 and 3:
# bad settings or a bad model would fail again. With KillMode=mixed quire itself ends its helpers.
UNIT_TEXT = """\
[Unit]
Description=quire, an inference server
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{environment}Restart=on-failure
RestartSec={restart_s}
RestartPreventExitStatus=2 3
TimeoutStopSec={stop_timeout_s}
KillMode=mixed

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """A service. ``command`` begins with the program's absolute path. ``folder`` is for logs."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    stop_timeout_s: int


def service_commands(parameters_of: Callable[..., Mapping[str, Any]]) -> typer.Typer:
    """Return the commands. parameters_of: parses the arguments of another quire command."""
    commands = typer.Typer(no_args_is_help=True, help="Have quire start by itself.")
    kept: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

    @commands.command("install", context_settings=kept)
    def _install(
        context: typer.Context,
        cluster: Annotated[
            bool, typer.Option("--cluster", help="Begin a cluster and serve on it, as its head.")
        ] = False,
        join: Annotated[
            str | None,
            typer.Option(metavar="HEAD", help="Be in the cluster of HEAD, and serve nothing else."),
        ] = None,
        key_file: Annotated[
            Path | None, typer.Option(help="With --join: a file of mode 0600 with its key.")
        ] = None,
    ) -> None:
        """Start quire at login: quire service install -- MODEL --port 8000."""
        if join is not None:
            typer.echo(install_member(join, key_file))
        else:
            names = ("cluster", "serve") if cluster else ("serve",)
            parameters = parameters_of(context.args, *names)
            typer.echo(install(context.args, parameters, cluster=cluster))

    @commands.command("remove")
    def _remove() -> None:
        """End the service, and forget it."""
        service = manager()
        if not service.file.exists():
            raise SettingError("there is no service to remove")
        service.remove()
        typer.echo(f"{service.file}: removed")

    @commands.command("status")
    def _status() -> None:
        """Say whether the service is installed, and runs."""
        service = manager()
        installed = service.file.exists()
        typer.echo(f"{service.file}: {service.status()}" if installed else "not installed")

    return commands


def install(arguments: Sequence[str], parameters: Mapping[str, Any], *, cluster: bool) -> str:
    """Install a service that serves. cluster: whether it starts a cluster. Raises StartError."""
    flags = with_further(flags_of(parameters), parameters.get("further") or ())
    settings = read_settings(parameters.get("config"), flags)
    arguments = absolute(arguments, parameters)
    if cluster:
        log, grace_s = settings.log.file or _log_folder() / OUTPUT_FILE, CLUSTER_STOP_GRACE_S
        arguments = ["cluster", "serve", "--start", *arguments]
    else:
        log, grace_s = settings.log.file or _log_folder() / "quire.log", STOP_GRACE_S
        own_log = [] if settings.log.file else ["--set", f"log.file={log}"]
        arguments = ["serve", *arguments, *own_log]
    done = manager().install(define(arguments, settings.server.drain_s + grace_s))
    where = f"http://{settings.server.host}:{settings.server.port}"
    return f"{done}\nserves on {where}, if its model can be served: the log is {log}"


def install_member(head: str, key_file: Path | None) -> str:
    """Install a service that keeps this machine in a cluster. key_file: the file with the cluster's
    key; None means the key of an earlier join. Raises StartError."""
    kept = cluster_folder().key
    if key_file is not None:
        write_private(kept, read_key(key_file))
    read_key(kept)
    arguments = ["cluster", "join", head, "--stay", "--key-file", str(kept)]
    done = manager().install(define(arguments, CLUSTER_STOP_GRACE_S))
    return f"{done}\nstays in the cluster of {head}"


def define(arguments: Sequence[str], stop_timeout_s: int) -> ServiceDefinition:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    command = (str(quire_command()), *arguments)
    return ServiceDefinition(command, kept, _log_folder(), stop_timeout_s)


def _log_folder() -> Path:
    try:
        return state_folder() / "log"
    except RuntimeError as error:
        raise SettingError(f"there is no home folder for a service's log: {error}") from error


def quire_command() -> Path:
    """Return the absolute path of the running ``quire`` command. Raises SettingError."""
    here, beside = Path(sys.argv[0]), Path(sys.executable).with_name("quire")
    places = (here, beside) if here.name == "quire" else (beside,)
    found = next((path for path in places if path.is_file()), shutil.which("quire"))
    if found is None:
        raise SettingError("the quire command is not found: install quire where it stays")
    return Path(found).absolute()


def absolute(arguments: Sequence[str], parameters: Mapping[str, Any]) -> list[str]:
    """Return the arguments with absolute paths. parameters: the same arguments, parsed."""
    given = (parameters.get("model"), *(parameters.get("models") or ()), parameters.get("config"))
    names = {str(name) for name in given if name}

    def path(word: str) -> str:
        file = Path(word).expanduser()
        return str(file.absolute()) if word in names and file.exists() else word

    written = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_config = equals and flag == "--config"
        written.append(f"{flag}={path(value)}" if is_config else path(argument))
    return written


def manager() -> "Launchd | Systemd":
    """Return the object for launchd or systemd. Raises SettingError, as its methods do."""
    try:
        if sys.platform == "darwin":
            return Launchd(Path.home() / "Library/LaunchAgents" / f"{LABEL}.plist")
        return Systemd(config_folder().parent / "systemd/user" / UNIT)
    except RuntimeError as error:
        raise SettingError(f"there is no home folder for a service: {error}") from error


class Launchd:
    """quire's launchd agent of one user. file: the agent's property list."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._domain = f"gui/{os.getuid()}"
        self._name = f"{self._domain}/{LABEL}"

    def install(self, definition: ServiceDefinition) -> str:
        """Load the agent, after an earlier agent has ended. Return a sentence for the user."""
        self._end(definition.stop_timeout_s)
        _write(self.file, plist(definition).decode())
        definition.folder.mkdir(parents=True, exist_ok=True)
        _run("launchctl", "enable", self._name)
        _run("launchctl", "bootstrap", self._domain, str(self.file))
        return f"{self.file}: runs now, and whenever you log in"

    def remove(self) -> None:
        loaded = plistlib.loads(self.file.read_bytes())
        self._end(int(loaded["ExitTimeOut"]))
        self.file.unlink()

    def status(self) -> str:
        done = _try("launchctl", "print", self._name)
        state, last_exit = STATE.search(done.stdout), LAST_EXIT.search(done.stdout)
        text = "not loaded" if done.returncode or state is None else state[1]
        return text + (f"; its last exit code: {last_exit[1]}" if last_exit else "")

    def _end(self, timeout_s: int) -> None:
        """Unload the agent, and wait until the agent has ended. Raises SettingError."""
        if _try("launchctl", "print", self._name).returncode:
            return
        deadline_s = time.monotonic() + timeout_s
        done = _try("launchctl", "bootout", self._name)
        if done.returncode and done.returncode not in STILL_ENDING:
            raise SettingError(f"launchctl bootout {self._name}: {done.stderr.strip()}")
        while _try("launchctl", "print", self._name).returncode == 0:
            if time.monotonic() > deadline_s:
                raise SettingError(f"{LABEL} has not ended in {timeout_s} s")
            time.sleep(FREE_POLL_S)


def plist(definition: ServiceDefinition) -> bytes:
    output = str(definition.folder / OUTPUT_FILE)
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            "EnvironmentVariables": dict(definition.environment),
            # No restart after exit code 0: the user ended quire, or the session has ended.
            "KeepAlive": {"SuccessfulExit": False},
            "RunAtLoad": True,
            # Full priority for processor and disk, because clients wait for answers.
            "ProcessType": "Interactive",
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": definition.stop_timeout_s,
            # quire writes its own log. Output before the log is open and output of a crash go here.
            "StandardOutPath": output,
            "StandardErrorPath": output,
        },
        sort_keys=False,
    )


class Systemd:
    """quire's systemd unit of one user. file: the unit's file. Raises SettingError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        done = _try(*USER, "show-environment")
        if done.returncode:
            raise SettingError(
                f"systemd does not run for this user here ({' '.join(done.stderr.split())}): a "
                "container's own manager, or that of the whole system, starts `quire serve` there"
            )

    def install(self, definition: ServiceDefinition) -> str:
        """Start the unit; replace an earlier unit. Return a sentence for the user."""
        _write(self.file, unit(definition))
        _run(*USER, "daemon-reload")
        _run(*USER, "enable", UNIT)
        _run(*USER, "restart", UNIT)
        return (
            f"{self.file}: runs now, and whenever you log in; `loginctl enable-linger` has it run "
            "from the machine's start on, and after you log out"
        )

    def remove(self) -> None:
        _run(*USER, "disable", "--now", UNIT)
        self.file.unlink()
        _run(*USER, "daemon-reload")

    def status(self) -> str:
        shown = _try(*USER, "show", UNIT, "--property=ActiveState,SubState,NRestarts,MainPID")
        figures = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
        state = f"{figures.get('ActiveState', 'unknown')} ({figures.get('SubState', 'unknown')})"
        return f"{state}; started again {figures.get('NRestarts', '?')} times"


def unit(definition: ServiceDefinition) -> str:
    variables = (quoted(f"{name}={value}") for name, value in definition.environment.items())
    return UNIT_TEXT.format(
        command=" ".join(map(quoted, definition.command)),
        # Undo the doubled dollars: systemd expands variables in ExecStart=, not in Environment=.
        environment="".join(f"Environment={word.replace('$$', '$')}\n" for word in variables),
        restart_s=RESTART_S,
        stop_timeout_s=definition.stop_timeout_s,
    )


def quoted(word: str) -> str:
    """Quote a word for a unit's file, so that systemd takes all of its characters literally."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'.replace("%", "%%").replace("$", "$$")


def _write(file: Path, text: str) -> None:
    """Write a service's file of mode 0600: the command's arguments may be secrets."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, text)
    except OSError as error:
        raise SettingError(f"{file}: {error.strerror}") from error


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    """Run launchctl or systemctl, which may fail. Raises SettingError if the program is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SettingError(
            f"{command[0]} is not to be had here ({error.strerror}): no service can be installed. "
            "Have what starts your other programs run `quire serve`"
        ) from error


def _run(*command: str) -> None:
    """Run launchctl or systemctl. Raises SettingError with its output if it fails."""
    done = _try(*command)
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        reason = output or f"it ended with {done.returncode}"
        raise SettingError(f"{' '.join(command)}: {reason}")
