"""Run a command of the setup, and say in one line how far it is. Needs Python alone.

    python progress.py --log FILE [--lock FILE] NAME -- COMMAND...

What pip and ninja print is read line by line; all of it goes to the log. At a terminal the line is
written over and over, elsewhere a new one comes every ten seconds. Where the command fails, the end
of what it printed is shown, and where the rest is.
"""

import argparse
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

TICK_S = 1.0
# Between two lines where output is no terminal.
LINE_EVERY_S = 10.0
MAX_COLUMNS = 79
LINES_OF_A_FAILURE = 40
COLLECTING = re.compile(r"Collecting (\S+?)(?:[=<>!~\[; ]|$)")
DOWNLOADING = re.compile(r"Downloading \S+ \((.+)\)")
INSTALLING = re.compile(r"Installing collected packages: (.*)")
COMPILING = re.compile(r"\[(\d+)/(\d+)\] .*?([\w.-]+?)(?:\.o)?$")


class State:
    """The progress of pip, as one line."""

    def __init__(self, packages: int) -> None:
        """packages: about how many pip will collect; 0 where that is not known."""
        self._packages = packages
        self._begun = 0
        self.text = "begins"

    def read(self, line: str) -> None:
        line = line.strip()
        if found := COLLECTING.match(line):
            self._begun += 1
            of = f" of about {self._packages}" if self._packages else ""
            self.text = f"package {self._begun}{of}: {found[1]}"
        elif found := DOWNLOADING.match(line):
            self.text = f"{self.text.partition(',')[0]}, {found[1]}"
        elif found := INSTALLING.match(line):
            self.text = f"installs {found[1].count(',') + 1} packages"
        elif found := COMPILING.match(line):
            self.text = f"compiles {found[1]} of {found[2]}: {found[3]}"


class Display:
    """The line."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._began_s = self._shown_s = time.monotonic()

    def show(self, text: str) -> None:
        """Print the state, if it is time for that."""
        now_s = time.monotonic()
        line = f"  {now_s - self._began_s:4.0f} s  {text}"[:MAX_COLUMNS]
        if self._terminal:
            self._write(f"\r\x1b[K{line}")
        elif now_s - self._shown_s >= LINE_EVERY_S:
            self._shown_s = now_s
            self._write(f"{line}\n")

    def end(self, text: str) -> None:
        begin = "\r\x1b[K" if self._terminal else ""
        self._write(f"{begin}  {time.monotonic() - self._began_s:4.0f} s  {text}\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def run(command: list[str], log: Path, packages: int) -> int:
    """Run the command; return its exit code. packages: see State."""
    state, display = State(packages), Display()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with (
        log.open("w", encoding="utf-8", errors="replace") as kept,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        output = process.stdout
        assert output is not None

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=TICK_S)
            except queue.Empty:
                display.show(state.text)
                continue
            if line is None:
                break
            kept.write(line)
            state.read(line)
            display.show(state.text)
        code = process.wait()
    if code:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_A_FAILURE:]
        display.end(f"failed; it said at last (all of it: {log}):")
        print("\n".join(end))
    else:
        display.end("done")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("name")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    packages = 0
    if given.lock is not None:
        pins = re.findall(r"^[\w.\[\]-]+==", given.lock.read_text(encoding="utf-8"), re.MULTILINE)
        packages = len(pins)
    print(f"setup: {given.name}", flush=True)
    return run(given.command, given.log, packages)


if __name__ == "__main__":
    sys.exit(main())
