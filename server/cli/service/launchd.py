"""quire as an agent of launchd, for one user of a Mac: launchd.plist(5), launchctl(1)."""

import os
import plistlib
import re
import time
from pathlib import Path

from server.cli.service.definition import (
    RESTART_S,
    ServiceDefinition,
    ServiceError,
    must_run,
    run_tool,
    write_definition,
)

LABEL = "org.quire.serve"
# Below the user's home.
AGENTS = "Library/LaunchAgents"
FILE = f"{LABEL}.plist"
# An agent that ends still has its name: it is asked for again until that is free.
FREE_POLL_S = 0.5
# Codes of launchctl's for a name that is still taken: EIO of bootstrap, EINPROGRESS of bootout.
STILL_ENDING = (5, 36, 37)
STATE = re.compile(r"^\tstate = (.+)$", re.MULTILINE)
LAST_EXIT = re.compile(r"^\tlast exit code = (.+)$", re.MULTILINE)


def plist(definition: ServiceDefinition) -> bytes:
    """Return the agent's property list."""
    said = str(definition.folder / "service.err")
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            "EnvironmentVariables": dict(definition.environment),
            # Not after a clean end: `launchctl kill` and the end of a session are clean.
            "KeepAlive": {"SuccessfulExit": False},
            "RunAtLoad": True,
            # Answers are waited for: no low priority for processor and disk.
            "ProcessType": "Interactive",
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": definition.stop_timeout_s,
            # The log is a file that quire keeps short itself. Here is what is said before it is
            # open, and by a process that falls.
            "StandardOutPath": said,
            "StandardErrorPath": said,
        },
        sort_keys=False,
    )


class Launchd:
    """A user's agent."""

    def __init__(self, home: Path) -> None:
        """home: the user's."""
        self._file = home / AGENTS / FILE
        self._domain = f"gui/{os.getuid()}"
        self._name = f"{self._domain}/{LABEL}"

    def install(self, definition: ServiceDefinition) -> str:
        """Write the property list, and load it."""
        self._end(definition.stop_timeout_s)
        write_definition(self._file, plist(definition))
        definition.folder.mkdir(parents=True, exist_ok=True)
        must_run("launchctl", "enable", self._name)
        must_run("launchctl", "bootstrap", self._domain, str(self._file))
        return f"{self._file}: runs now, and whenever you log in"

    def remove(self) -> str:
        """Unload it, and delete the property list."""
        if not self._file.exists():
            raise ServiceError("there is no service to remove")
        loaded = plistlib.loads(self._file.read_bytes())
        self._end(int(loaded["ExitTimeOut"]))
        self._file.unlink()
        return f"{self._file}: removed"

    def status(self) -> str:
        if not self._file.exists():
            return "not installed"
        done = run_tool("launchctl", "print", self._name)
        state, last_exit = STATE.search(done.stdout), LAST_EXIT.search(done.stdout)
        said = "not loaded" if done.returncode or state is None else state[1]
        if last_exit is not None:
            said += f"; its last exit code: {last_exit[1]}"
        return f"{self._file}: {said}"

    def _end(self, timeout_s: int) -> None:
        """Unload it, and wait until it has ended. Raises ServiceError."""
        if run_tool("launchctl", "print", self._name).returncode:
            return
        deadline_s = time.monotonic() + timeout_s
        done = run_tool("launchctl", "bootout", self._name)
        if done.returncode and done.returncode not in STILL_ENDING:
            raise ServiceError(f"launchctl bootout {self._name}: {done.stderr.strip()}")
        while run_tool("launchctl", "print", self._name).returncode == 0:
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{LABEL} has not ended in {timeout_s} s")
            time.sleep(FREE_POLL_S)
