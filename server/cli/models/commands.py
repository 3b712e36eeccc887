"""The flags of the commands for models, and their help."""

from pathlib import Path
from typing import Annotated

import typer

from server.cli.sentences import one_sentence, say

PANEL = "Models"
Model = Annotated[
    str,
    typer.Argument(
        help="An id on the hub, org/name or org/name@revision; a short name such as qwen3:4b; or "
        "the last part of the name of a model that is here."
    ),
]
File = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; `quire settings` prints one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def add_to(app: typer.Typer) -> None:
    for command in (pull, models, show, rm):
        app.command(rich_help_panel=PANEL)(command)


def pull(
    model: Model,
    config: File = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched; fetch no weights.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Fetch it though this machine has not the memory for it."),
    ] = False,
) -> None:
    """Fetch a model from the Hugging Face hub, once it is sure that it can be served here.

    Goes on where an earlier download has ended.
    """
    # Here and not above: what commands need takes long to import.
    from server.cli.models.pull import pull_model

    with one_sentence():
        pull_model(model, config, typer.echo, dry_run=dry_run, force=force)


def models(config: File = None, as_json: AsJson = False) -> None:
    """List the models on this disk: of the hub's cache, and of models.folders."""
    from server.cli.models.facts import list_models

    with one_sentence():
        typer.echo(list_models(config, say, as_json=as_json))


def show(model: Model, config: File = None, as_json: AsJson = False) -> None:
    """Show what is known of a model on this disk, and how this machine would serve it."""
    from server.cli.models.facts import show_model

    with one_sentence():
        typer.echo(show_model(model, config, as_json=as_json))


def rm(
    model: Model,
    config: File = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the Hugging Face hub's cache; with @revision that commit alone."""
    from server.cli.models.removal import find_removal

    with one_sentence():
        removal = find_removal(model, config)
        typer.echo(removal.text())
        if not yes:
            typer.confirm("Remove it?", abort=True)
        typer.echo(removal.execute())
