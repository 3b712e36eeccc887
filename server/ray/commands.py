"""Defines the commands of ``quire cluster``, with flags and help texts."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from server.cli.cluster_folder import ClusterError
from server.ray.machines import ReplicaCounts

NOT_INSTALLED = (
    "several machines are served on Ray, which is not installed: "
    "`uv tool install 'quire[cluster]'`, or `pip install 'quire[cluster]'`"
)


def cluster_commands() -> typer.Typer:
    cluster = typer.Typer(no_args_is_help=True, help="Serve on several machines, on Ray.")
    for command in (start, join, serve, status, stop):
        cluster.command()(command)
    return cluster


def load_commands() -> ModuleType:
    """Return the module server.ray.run. Raises ClusterError without Ray."""
    if find_spec("ray") is None:
        raise ClusterError(NOT_INSTALLED)
    from server.ray import run

    return run


def start(
    address: Annotated[
        str | None, typer.Option(help="Address at which the other machines reach this one.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port of the head.")] = None,
) -> None:
    """Make this machine the head of a cluster, and print the command for the other machines."""
    typer.echo(load_commands().start_cluster(address, port))


def join(
    head: Annotated[str, typer.Argument(help="HOST:PORT, as `quire cluster start` prints it.")],
    key_file: Annotated[
        Path | None,
        typer.Option(help="File of mode 0600 with the cluster's key. Default: ask for it."),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Wait here, and join again whenever the cluster has ended: for a service.",
        ),
    ] = False,
) -> None:
    """Make this machine a member of a cluster."""
    run = load_commands()
    if stay:
        run.stay_in_cluster(head, key_file, _ask_key, typer.echo)
    else:
        typer.echo(run.join_cluster(head, key_file, _ask_key))


def serve(
    model: Annotated[str, typer.Argument(help="A model, as for `quire serve`.")],
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|LEAST-MOST",
            help="How many replicas. Default: as many as fit. A range: as many as the load needs.",
        ),
    ] = None,
    per_machine: Annotated[int, typer.Option(min=1, help="Replicas on one machine, at most.")] = 1,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file; `quire settings` prints one.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    further: Annotated[
        list[str] | None,
        typer.Option("--set", help="SECTION.NAME=VALUE, for any setting; may be repeated."),
    ] = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start",
            help="Begin the cluster as well, anew where one runs here, and end it: for a service.",
        ),
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="With --start: this machine's address, for the others.")
    ] = None,
    head_port: Annotated[
        int | None, typer.Option(help="With --start: the port of the head.")
    ] = None,
) -> None:
    """Serve a model on all machines of the cluster at one address. Run this on the head."""
    run = load_commands()
    flags = {"server": {"host": host, "port": port}}
    counts = _read_counts(replicas)
    arguments = (model, counts, per_machine, config, flags, further or (), typer.echo)
    if start:
        run_serve = partial(run.serve_cluster, *arguments, waits=True)
        run.serve_from_start(address, head_port, run_serve, typer.echo)
    else:
        run.serve_cluster(*arguments)


def status() -> None:
    """Show the machines and the states of the replicas. Run this on the head."""
    typer.echo(load_commands().cluster_status())


def stop() -> None:
    """Take this machine out of its cluster. On the head, this ends the whole cluster."""
    typer.echo(load_commands().stop_cluster())


def _read_counts(written: str | None) -> ReplicaCounts | None:
    try:
        return None if written is None else ReplicaCounts.read(written)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--replicas") from error


def _ask_key() -> str:
    return str(typer.prompt("the cluster's key", hide_input=True))
