"""quire as a unit of one user's systemd: systemd.service(5), systemd.unit(5), systemctl(1)."""

from pathlib import Path

from server.cli.service.definition import (
    RESTART_S,
    ServiceDefinition,
    ServiceError,
    must_run,
    run_tool,
    write_definition,
)

UNIT = "quire.service"
# Below the folder of the user's settings.
UNITS = "systemd/user"
USER = ("systemctl", "--user")
# Settings that cannot work, and a model that cannot be served: started again, they do no more.
HOPELESS_EXITS = "2 3"


def unit(definition: ServiceDefinition) -> str:
    """Return the unit's text."""
    environment = "".join(
        # Dollars mean nothing there.
        f"Environment={quoted(f'{name}={value}').replace('$$', '$')}\n"
        for name, value in definition.environment.items()
    )
    return (
        "[Unit]\n"
        "Description=quire, an inference server\n"
        # No limit on starts: each comes after a pause.
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStart={' '.join(map(quoted, definition.command))}\n"
        f"{environment}"
        "Restart=on-failure\n"
        f"RestartSec={RESTART_S}\n"
        f"RestartPreventExitStatus={HOPELESS_EXITS}\n"
        f"TimeoutStopSec={definition.stop_timeout_s}\n"
        # Its helpers end with it, and are not told on their own.
        "KillMode=mixed\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def quoted(word: str) -> str:
    """Return a word as units spell it: neither specifiers, nor variables, nor more words."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'.replace("%", "%%").replace("$", "$$")


class Systemd:
    """A user's unit."""

    def __init__(self, settings_folder: Path) -> None:
        """settings_folder: where the user's programs have theirs. Raises ServiceError where the
        user has no systemd."""
        self._file = settings_folder / UNITS / UNIT
        done = run_tool(*USER, "show-environment")
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise ServiceError(
                f"systemd does not run for this user here ({said}): a container's own manager, or "
                "that of the whole system, starts `quire serve` there"
            )

    def install(self, definition: ServiceDefinition) -> str:
        """Write the unit, and start it."""
        write_definition(self._file, unit(definition).encode())
        must_run(*USER, "daemon-reload")
        must_run(*USER, "enable", UNIT)
        must_run(*USER, "restart", UNIT)
        return (
            f"{self._file}: runs now, and whenever you log in; `loginctl enable-linger` has it run "
            "from the machine's start on, and after you log out"
        )

    def remove(self) -> str:
        """Stop it, and delete the unit."""
        if not self._file.exists():
            raise ServiceError("there is no service to remove")
        must_run(*USER, "disable", "--now", UNIT)
        self._file.unlink()
        must_run(*USER, "daemon-reload")
        return f"{self._file}: removed"

    def status(self) -> str:
        if not self._file.exists():
            return "not installed"
        shown = run_tool(*USER, "show", UNIT, "--property=ActiveState,SubState,NRestarts,MainPID")
        figures = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
        state = f"{figures.get('ActiveState', 'unknown')} ({figures.get('SubState', 'unknown')})"
        return f"{self._file}: {state}; started again {figures.get('NRestarts', '?')} times"
