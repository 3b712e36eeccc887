"""A gateway in front of plain servers: installed by its name, beside everything of ours."""

import subprocess
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.machines import Home, flags, free_port

ROOT = Path(__file__).parents[2]
PACKAGE, VERSION = "sglang-router", "0.3.2"
FOLDER = ROOT / "build" / "gateways" / f"{PACKAGE}-{VERSION}"
PYTHON = FOLDER / "bin" / "python"
SERVERS = 3


def install() -> None:
    """Install the gateway where it is not; what it brings stays out of our own environment."""
    if PYTHON.exists() and _version() == VERSION:
        return
    venv.create(FOLDER, clear=True, with_pip=True)
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:")
    subprocess.run([PYTHON, "-m", "pip", "install", *options, f"{PACKAGE}=={VERSION}"], check=True)


def _version() -> str:
    asks = f"from importlib.metadata import version; print(version('{PACKAGE}'))"
    return subprocess.run(
        [PYTHON, "-c", asks], capture_output=True, text=True, check=False
    ).stdout.strip()


@contextmanager
def behind_gateway(home: Home) -> Iterator[int]:
    """Serve by plain servers behind it, and yield its port."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(SERVERS)]
        for port in ports:
            stack.enter_context(home.serving("serve", "demo", *flags(port), port=port))
        port = free_port()
        stack.enter_context(
            home.serving(
                "--worker-urls",
                *(f"http://127.0.0.1:{its}" for its in ports),
                "--policy=cache_aware",
                f"--port={port}",
                f"--prometheus-port={free_port()}",
                "--prometheus-host=127.0.0.1",
                port=port,
                command=(str(PYTHON), "-m", "sglang_router.launch_router"),
                ready="/readiness",
            )
        )
        yield port
