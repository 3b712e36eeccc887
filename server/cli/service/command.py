"""``quire service install | remove | status``."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.user_folders import config_folder
from server.cli.cluster_folder import cluster_folder, read_key, write_own
from server.cli.sentences import one_sentence
from server.cli.service.definition import (
    Manager,
    ServiceDefinition,
    ServiceError,
    define,
    define_head,
    define_member,
)
from server.cli.service.launchd import Launchd
from server.cli.service.systemd import Systemd
from server.cli.settings import flags_of, read_settings, with_further
from server.config import Config

# Where launchd writes what a service says; systemd has its journal.
HEAD_LOG = "service.err"
Parameters = Callable[[Sequence[str]], Mapping[str, Any]]


def service_commands(
    parameters_of_serve: Parameters, parameters_of_cluster: Parameters
) -> typer.Typer:
    """Return the commands. parameters_of_serve, parameters_of_cluster: return arguments of ``quire
    serve`` and of ``quire cluster serve`` as these read them."""
    service = typer.Typer(no_args_is_help=True, help="Have quire start by itself.")
    kept: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

    @service.command("install", context_settings=kept)
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
        """Serve from every login on: quire service install -- MODEL --port 8000."""
        with one_sentence():
            if join is not None:
                told = install_member(join, key_file)
            elif cluster:
                told = install(
                    context.args, parameters_of_cluster(context.args), define_head, HEAD_LOG
                )
            else:
                told = install(context.args, parameters_of_serve(context.args))
            typer.echo(told)

    @service.command("remove")
    def _remove() -> None:
        """End the service, and forget it."""
        with one_sentence():
            typer.echo(manager().remove())

    @service.command("status")
    def _status() -> None:
        """Say whether the service is installed, and runs."""
        with one_sentence():
            typer.echo(manager().status())

    return service


def manager() -> Manager:
    """Return what starts this user's services. Raises ServiceError."""
    try:
        if sys.platform == "darwin":
            return Launchd(Path.home())
        return Systemd(config_folder().parent)
    except RuntimeError as error:
        raise ServiceError(f"there is no home folder for a service: {error}") from error


def install(
    arguments: Sequence[str],
    parameters: Mapping[str, Any],
    defined: Callable[[Sequence[str], Config], ServiceDefinition] = define,
    log_name: str = "quire.log",
) -> str:
    """Install the service. parameters: those of the command that serves, as it reads the arguments.
    defined: returns what runs it. log_name: of its log. Raises StartError."""
    flags = with_further(flags_of(parameters), parameters.get("further") or ())
    settings = read_settings(parameters.get("config"), flags)
    definition = defined(absolute(arguments, named_files(parameters)), settings)
    told = manager().install(definition)
    log = settings.log.file or definition.folder / log_name
    where = f"http://{settings.server.host}:{settings.server.port}"
    return f"{told}\nserves on {where}, if its model can be served: the log is {log}"


def install_member(head: str, key_file: Path | None) -> str:
    """Install the service of a machine in a cluster. key_file: with its key; None where it has
    joined before. Raises StartError."""
    kept = cluster_folder().key
    if key_file is not None:
        write_own(kept, read_key(key_file))
    read_key(kept)
    return f"{manager().install(define_member(head, kept))}\nstays in the cluster of {head}"


def named_files(parameters: Mapping[str, Any]) -> Iterable[str]:
    """Yield the files and folders that the arguments of ``quire serve`` name."""
    for name in ("model", "models", "config"):
        given = parameters.get(name) or ()
        yield from map(str, (given,) if isinstance(given, str | Path) else given)


def absolute(arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return arguments whose files are found from any folder. names: which of them are files, or
    else models' ids."""
    found = {
        name: str(Path(name).expanduser().absolute())
        for name in names
        if Path(name).expanduser().exists()
    }
    written = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if equals and flag == "--config":
            written.append(f"{flag}={found.get(value, value)}")
        else:
            written.append(found.get(argument, argument))
    return written
