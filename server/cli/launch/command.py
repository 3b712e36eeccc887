"""``quire launch claude | codex | opencode | zed``."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from server.cli.launch.running_server import LaunchError, RunningServer, ask_server
from server.cli.launch.tools import TOOLS, WHERE_TO_GET, Launch, configure_zed
from server.cli.sentences import one_sentence
from server.cli.settings import read_settings

ZED = "zed"
# Where a server wants no key; tools want one all the same.
ANY_KEY = "any"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Which server a tool is for; what is None is as the settings say."""

    url: str | None
    key: str | None
    model: str | None
    only_print: bool


def launch_command(app: typer.Typer) -> None:
    passed: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    tools = ", ".join((*TOOLS, ZED))

    @app.command("launch", context_settings=passed)
    def _launch(
        context: typer.Context,
        tool: Annotated[str, typer.Argument(help=f"One of {tools}.")],
        url: Annotated[
            str | None, typer.Option(help="Address of the server; else that of your settings.")
        ] = None,
        model: Annotated[
            str | None, typer.Option(help="One of the server's models; else one that is loaded.")
        ] = None,
        key: Annotated[
            str | None, typer.Option(help="The server's key; else that of your settings.")
        ] = None,
        only_print: Annotated[
            bool, typer.Option("--print", help="Print what would be done, and do nothing.")
        ] = False,
    ) -> None:
        """Start a coding tool with a running server: quire launch claude -- ARGUMENTS of its own.

        The tool is told address, model and context window. claude, codex and opencode are started,
        and their files stay as they are; zed's settings are changed.
        """
        with one_sentence():
            typer.echo(launch(tool, context.args, LaunchOptions(url, key, model, only_print)))


def launch(tool: str, arguments: Sequence[str], options: LaunchOptions) -> str:
    """Start a tool in place of this process; or return what was, or would be, done. Raises
    StartError."""
    if tool not in (*TOOLS, ZED):
        raise LaunchError(f"{tool!r} is no tool that is known: {', '.join((*TOOLS, ZED))}")
    server = server_of(options)
    if tool == ZED:
        return configure_zed(server, only_print=options.only_print)
    how = TOOLS[tool](server, os.environ)
    for warning in how.warnings:
        typer.echo(f"quire: {warning}", err=True)
    command = (*how.command, *arguments)
    if options.only_print:
        return as_shell(how, command)
    program = shutil.which(how.command[0])
    if program is None:
        raise LaunchError(f"{tool} is not found on the PATH: {WHERE_TO_GET[tool]}")
    typer.echo(
        f"quire: {tool} with {server.model} at {server.url}, {server.context} tokens", err=True
    )
    environment = dict(os.environ)
    for name, value in how.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, environment)  # noqa: S606
    except OSError as error:
        raise LaunchError(f"{program}: {error.strerror}") from error


def server_of(options: LaunchOptions) -> RunningServer:
    """Find the server. Raises StartError."""
    # Here and not above: it loads the engine, which other commands do without.
    from server.cli.running import server_address

    settings = read_settings(None, {})
    keys = settings.access.api_keys
    key = options.key or (keys[0].get_secret_value() if keys else ANY_KEY)
    return ask_server(options.url or server_address(settings), key, options.model)


def as_shell(how: Launch, command: Sequence[str]) -> str:
    """Return a start as people would type it, without secrets."""
    gone = [f"-u {name}" for name, value in how.environment.items() if value is None]
    given = [
        f"{name}={'...' if name in how.secrets and value != ANY_KEY else shlex.quote(value)}"
        for name, value in how.environment.items()
        if value is not None
    ]
    return " \\\n  ".join([*(["env", *gone] if gone else []), *given, shlex.join(command)])
