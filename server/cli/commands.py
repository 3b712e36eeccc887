"""The ``quire`` commands. A backend is a kind of memory for K and V. Exit codes: 0 success; 1 the
engine failed, or no backend works; 2 unusable settings; 3 unusable model; 4 the GPU's backend
failed, and a restarted quire chooses another backend."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli import without_collection
from server.cli.launch import launch_command
from server.cli.sentences import HEAD_OF_LINE, OneSentence, say
from server.cli.service import service_commands
from server.cli.settings import (
    DISK_FOLDER_TEXT,
    FLAGS,
    KV_BACKEND_TEXT,
    default_of,
    flags_of,
    own_settings_file,
    read_settings,
    with_further,
)
from server.shipped import SETTINGS_FILE, shipped

# Section of the settings -> heading in the help, under which the section's flags are listed.
PANELS = {
    "server": "Network",
    "access": "Network",
    "cache": "Memory of K and V",
    "engine": "Scheduling",
    "log": "Logging",
}
MODELS_PANEL = "Models"
app = typer.Typer(
    cls=OneSentence,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    _open_closed_streams()
    _leave_lost_folder()
    try:
        app()
    except SystemExit as end:
        # Exit without tearing down the interpreter: MLX's thread-local objects call into the
        # interpreter after their thread was joined, and would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null. Otherwise a socket, or a memory file of K and V,
    would get descriptor 0, 1 or 2, and libraries would write their output into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # os.open returns the lowest free descriptor: that of the closed stream.
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _leave_lost_folder() -> None:
    """Change to / if the working folder was removed: libraries fail without a working folder."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
        say("the working folder is gone: relative paths begin at /")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{HEAD_OF_LINE} {version('quire')}")
        raise typer.Exit


def _flag(setting: str, text: str) -> Any:
    """Return the typer option for a setting; the option's help ends with the setting's default."""
    section, _, _ = setting.partition(".")
    return typer.Option(
        help=f"{text} Default: {default_of(setting)}.", rich_help_panel=PANELS[section]
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``**flags`` of a command by an option for each entry of FLAGS."""
    parameters = [p for p in signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, (setting, kind, text) in FLAGS.items():
        option: Any = Annotated[kind | None, _flag(setting, text)]
        command.__annotations__[name] = option
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


Model = Annotated[
    str,
    typer.Argument(
        help="A model's folder; its id on the hub, org/name or org/name@revision; a short name "
        "such as qwen3:4b; or demo, the bundled demo model."
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        help="An id on the hub, org/name or org/name@revision; a short name such as qwen3:4b; or "
        "the last part of the name of a model that is here."
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="As for `quire serve`. Without: what fits is listed."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Host = Annotated[str | None, _flag("server.host", "Address of the server.")]
Port = Annotated[int | None, _flag("server.port", "Port of the server.")]
File = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file; `quire settings` prints one. Without: `quire settings --path`.",
    ),
]
DiskFolder = Annotated[str | None, _flag("cache.disk_folder", DISK_FOLDER_TEXT)]
KVBackend = Annotated[str | None, _flag("cache.kv_backend", KV_BACKEND_TEXT)]


@app.callback()
def quire(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Serve language models to OpenAI, Anthropic and other clients, from memory that is mapped as
    it is needed."""


@app.command()
@_with_flags
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="A model's folder, its id on the hub, or demo, the bundled demo model. With "
            "several, or with none for all of this disk, each is loaded when it is asked for.",
        ),
    ] = None,
    config: File = None,
    further: Annotated[
        list[str] | None,
        typer.Option("--set", help="SECTION.NAME=VALUE, for any setting; may be repeated."),
    ] = None,
    **flags: Any,
) -> None:
    """Serve a model, or several, to OpenAI, Anthropic and Ollama clients."""
    tables = with_further(flags_of(flags), further or ())
    settings = read_settings(config, tables)
    if settings.log.format == "text":
        # Serve even if this line cannot be written.
        with suppress(OSError):
            say(f"loading {', '.join(models or ())}".rstrip())
    # Imported here: these modules import MLX, but doctor must start even if MLX is broken,
    # and other commands must start fast.
    from server.catalogue.folder_reader import reading_process

    with closing(reading_process()) as reading:
        reading.start()  # early: the process imports its modules while this one imports its own
        with without_collection():
            from server.cli.serve import serve_model
            from server.cli.serve_models import serve_models

        if models is not None and len(models) == 1:
            serve_model(models[0], settings, reading)
        else:
            serve_models(models or (), settings, reading)


def _echo_suggestions(config: Path | None, **machine: str | None) -> None:
    """Print the models that fit. ``machine`` has the options ``memory`` and ``device``, if any."""
    from server.cli.suggestions import suggest

    typer.echo(suggest(config, **machine))


@app.command()
def run(
    model: OptionalModel = None,
    question: Annotated[
        str | None, typer.Argument(help="Print the answer and end; also from a pipe.")
    ] = None,
    config: File = None,
) -> None:
    """Chat with a model in the terminal.

    If a running quire serves the model, that quire answers; else this chat loads the model itself.
    """
    if model is None:
        return _echo_suggestions(config)
    from server.cli.run import run_model

    return run_model(model, question, config)


@app.command()
def bench(model: Model, config: File = None, as_json: AsJson = False) -> None:
    """Measure how fast a model is on this machine, in about a minute, and print one line."""
    from server.cli.bench import bench_model

    typer.echo(bench_model(model, config, as_json=as_json))


@app.command()
def plan(
    model: OptionalModel = None,
    config: File = None,
    context: Annotated[int | None, typer.Option(help="The longest sequence, in tokens.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory to plan for, such as 24GiB.")] = None,
    device: Annotated[
        str | None, typer.Option(help="A device by name, such as 'M4 Pro'; else this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for pictures (SVG).")] = None,
) -> None:
    """Print whether a model fits, its context and its speed, and how it uses memory; load nothing.

    No weights of a model on the hub are fetched.
    """
    if model is None:
        return _echo_suggestions(config, memory=memory, device=device)
    from server.cli.plan import plan_model

    text = plan_model(model, config, context=context, memory=memory, device=device, out=out)
    return typer.echo(text)


@app.command()
def ps(config: File = None, host: Host = None, port: Port = None) -> None:
    """Print which models a running server has loaded."""
    from server.cli.running import loaded_models

    settings = read_settings(config, {"server": {"host": host, "port": port}})
    typer.echo(loaded_models(settings))


@app.command()
def stop(
    model: Annotated[str, typer.Argument(help="The model, as `quire ps` calls it.")],
    config: File = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Have a running server unload an idle model."""
    from server.cli.running import unload

    settings = read_settings(config, {"server": {"host": host, "port": port}})
    typer.echo(unload(settings, model))


@app.command()
def settings(
    path: Annotated[
        bool, typer.Option("--path", help="Print where your own settings file is, or would be.")
    ] = False,
) -> None:
    """Print a settings file with every setting, its default and its meaning."""
    if path:
        typer.echo(own_settings_file())
        return
    typer.echo(shipped(SETTINGS_FILE).read_text(encoding="utf-8"), nl=False)


@app.command()
def doctor(
    config: File = None,
    kv_backend: KVBackend = None,
    as_json: AsJson = False,
    release_test: Annotated[
        bool,
        typer.Option(
            help="Also try to give memory of the GPU back. On some Macs this has brought the whole "
            "system down, which no process of its own can contain: save your work first."
        ),
    ] = False,
    stress: Annotated[
        bool,
        typer.Option(
            help="Also change mappings while commands run, fifty rounds, as serving does. A Mac "
            "that cannot may go down as a whole: save your work first."
        ),
    ] = False,
    forget_faults: Annotated[
        bool, typer.Option(help="Forget what backends have done here before, whatever they do now.")
    ] = False,
    first_hour: Annotated[
        bool,
        typer.Option(
            help="Instead measure this machine for an hour at most, and write a file to publish, "
            "without private data. The release and stress tests come last: save your work first."
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --first-hour: a model to measure, beside the demo.")
    ] = None,
) -> None:
    """Try everything that serving needs on this machine, and say what works and what would serve.

    Ends with 0 if something can serve. Loads a model for --first-hour only. Records which backends
    fail, and whether the release test has passed; forgets the faults of backends that work now.
    """
    from server.cli.doctor import run_doctor, run_first_hour

    def progress(what: str) -> None:
        say(f"trying {what}")

    tables = {"cache": {"kv_backend": kv_backend}}
    if first_hour:
        say("this takes an hour at most; the last tests have crashed some Macs: save your work")
        models = ["demo", model] if model else ["demo"]
        works = run_first_hour(config, tables, models, progress, typer.echo)
        raise typer.Exit(0 if works else 1)
    text, serves = run_doctor(
        config,
        tables,
        progress,
        as_json=as_json,
        release_test=release_test,
        stress=stress,
        forget_faults=forget_faults,
    )
    typer.echo(text)
    raise typer.Exit(0 if serves else 1)


@app.command(rich_help_panel=MODELS_PANEL)
def pull(
    model: OptionalModel = None,
    config: File = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be fetched; fetch no weights.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Fetch it though this machine has not the memory for it."),
    ] = False,
) -> None:
    """Fetch a model from the Hugging Face hub, after a check that this machine can serve the model.

    Continues an earlier download that was not finished.
    """
    if model is None:
        return _echo_suggestions(config)
    from server.cli.models import pull_model

    return pull_model(model, config, typer.echo, dry_run=dry_run, force=force)


@app.command("list", hidden=True)
@app.command(rich_help_panel=MODELS_PANEL)
def models(
    config: File = None,
    as_json: AsJson = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also repositories without weights on this disk.")
    ] = False,
) -> None:
    """List the models on this disk: of the hub's cache, models.folders and LM Studio."""
    from server.cli.models import list_models

    typer.echo(list_models(config, say, as_json=as_json, show_all=show_all))


@app.command(rich_help_panel=MODELS_PANEL)
def show(model: ModelName, config: File = None, as_json: AsJson = False) -> None:
    """Show the facts of a model on this disk, and how this machine would serve it."""
    from server.cli.models import show_model

    typer.echo(show_model(model, config, as_json=as_json))


@app.command(rich_help_panel=MODELS_PANEL)
def rm(
    model: ModelName,
    config: File = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the Hugging Face hub's cache; with @revision that commit alone."""
    from server.cli.models import remove_model

    confirm = partial(typer.confirm, "Remove it?", abort=True)
    remove_model(model, config, typer.echo, (lambda: None) if yes else confirm)


cache = typer.Typer(no_args_is_help=True, help="Show, check and remove the prefixes on disk.")


@cache.command("show")
def _show_cache(config: File = None, disk_folder: DiskFolder = None) -> None:
    """Show what each model has on disk, and where."""
    from server.cli.cache import show_cache

    typer.echo(show_cache(config, disk_folder))


@cache.command("clear")
def _clear_cache(
    config: File = None,
    disk_folder: DiskFolder = None,
    model: Annotated[
        str | None, typer.Option(help="Of this model alone, as `quire cache show` calls it.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help='Of this API key alone; "" is of requests without a key.')
    ] = None,
) -> None:
    """Remove what is on disk. Servers may run; what they have in memory stays."""
    from server.cli.cache import clear_cache

    typer.echo(clear_cache(config, disk_folder, model, key))


@cache.command("verify")
def _verify_cache(config: File = None, disk_folder: DiskFolder = None) -> None:
    """Read all that is on disk, and remove what is broken. Ends with 1 if anything was."""
    from server.cli.cache import verify_cache

    raise typer.Exit(0 if verify_cache(config, disk_folder, typer.echo) else 1)


def _parameters_of(arguments: Sequence[str], *names: str) -> dict[str, Any]:
    """Parse arguments like the quire command with the given names, with the same errors."""
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    parameters: dict[str, Any] = command.make_context(
        " ".join(("quire", *names)), list(arguments)
    ).params
    return parameters


launch_command(app)
app.add_typer(cache, name="cache")
# Imported by name: server.ray imports server.cli, so that an import statement is forbidden here.
app.add_typer(import_module("server.ray.commands").cluster_commands(), name="cluster")
app.add_typer(service_commands(_parameters_of), name="service")
