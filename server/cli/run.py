"""``quire run``: chat with a model in the terminal."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import typer

from server.catalogue.hub import FoundModel, find_model
from server.catalogue.lookup import aliases
from server.catalogue.names import DEMO, DEMO_ID
from server.cli.launch import ANY_KEY, models_of
from server.cli.model_files import check_found, model_errors, new_reader
from server.cli.models import pull_model
from server.cli.own_server import own_server
from server.cli.running import NotRunningError, client_of, server_address
from server.cli.sentences import say
from server.cli.settings import read_settings
from server.config import Config, SettingError

PROMPT, MORE, FENCE = ">>> ", "... ", '"""'
HELP = "/clear forgets the conversation, /system TEXT sets what it begins with, Ctrl-D ends"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def run_model(name: str, question: str | None, file: Path | None) -> None:
    """Answer a question and end, or chat until Ctrl-D. Text from a pipe is the question, or is
    added to ``question``. Raises StartError."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interactive = sys.stdin.isatty()
    given = [question, None if interactive else sys.stdin.read()]
    settings = read_settings(file, {})
    with _server(name, settings, file) as (url, model), client_of(settings, url) as client:
        chat = Chat(client, model)
        if whole := "\n\n".join(text for text in given if text):
            chat.ask(whole)
        elif interactive:
            chat.talk()


class Chat:
    """A conversation with a model of a server."""

    def __init__(self, client: httpx2.Client, model: str) -> None:
        self._client = client
        self._model = model
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []

    def talk(self) -> None:
        """Read questions and commands from the terminal until Ctrl-D."""
        # Imported here: from then on input() edits lines, and recalls those of this chat.
        import readline  # noqa: F401

        say(f"{self._model}: {HELP}")
        while True:
            try:
                text = input(PROMPT).strip()
                command, _, rest = text.partition(" ")
                if text.startswith(FENCE):
                    self.ask(_read_to_fence(text))
                elif command == "/clear":
                    self._turns.clear()
                elif command == "/system":
                    self._system = [{"role": "system", "content": rest}] if rest else []
                elif command.startswith("/"):
                    say(HELP)
                elif text:
                    self.ask(text)
            except EOFError:
                return typer.echo()
            except KeyboardInterrupt:
                typer.echo()
            except NotRunningError as error:
                say(str(error))

    def ask(self, question: str) -> None:
        """Print the answer as it comes. Ctrl-C ends the answer; the chat keeps its first part.
        Raises NotRunningError."""
        turn = {"role": "user", "content": question}
        answer = ""
        try:
            for piece in self._print_answer([*self._system, *self._turns, turn]):
                answer += piece
        except KeyboardInterrupt:
            typer.echo(PLAIN, nl=False)
        finally:
            typer.echo()
        self._turns += [turn, {"role": "assistant", "content": answer}]

    def _print_answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Print and yield the pieces of the answer. On a terminal, also print thoughts, dimmed."""
        terminal, thinking = sys.stdout.isatty(), False
        for delta in self._deltas(messages):
            thought, text = delta.get("reasoning_content"), delta.get("content")
            if terminal and (thought or text) and thinking != bool(thought):
                thinking = bool(thought)
                typer.echo(DIM if thinking else f"{PLAIN}\n\n", nl=False)
            if terminal:
                # Other characters could move the cursor or change the terminal.
                shown = (c for c in thought or text or "" if c.isprintable() or c in "\n\t")
                typer.echo("".join(shown), nl=False)
            elif text:
                typer.echo(text, nl=False)
            yield text or ""

    def _deltas(self, messages: list[dict[str, str]]) -> Iterator[dict[str, str | None]]:
        """Raises NotRunningError, with the server's own sentence if there is one."""
        body = {"model": self._model, "messages": messages, "stream": True}
        path = "/v1/chat/completions"
        try:
            with self._client.stream("POST", path, json=body, timeout=None) as answer:
                if answer.status_code != httpx2.codes.OK:
                    raise NotRunningError(json.loads(answer.read())["error"]["message"])
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise NotRunningError(event["error"]["message"])
                    yield from (choice["delta"] for choice in event["choices"])
        except httpx2.HTTPError as error:
            raise NotRunningError(f"the server has ended the answer: {error}") from error


def _read_to_fence(line: str) -> str:
    """Read lines to one that ends with triple quotes; return the text between the quotes."""
    text = line.removeprefix(FENCE)
    while not text.endswith(FENCE):
        text += "\n" + input(MORE)
    return text.removesuffix(FENCE).strip()


@contextmanager
def _server(name: str, settings: Config, file: Path | None) -> Iterator[tuple[str, str]]:
    """Yield a server's address and the model's name there. The server is a running quire that
    serves the model, or else a new process that ends with the block. Raises StartError."""
    url, wanted = server_address(settings), aliases().get(name, DEMO_ID if name == DEMO else name)
    try:
        served = models_of(url, settings.access.first_key or ANY_KEY)
    except SettingError:
        served = []
    if any((each["id"], each.get("owned_by")) == (wanted, "quire") for each in served):
        yield url, wanted
        return
    model = _model_here(name, settings, file)
    with own_server(settings, model.folder, model.name) as own:
        yield own, model.name


def _model_here(name: str, settings: Config, file: Path | None) -> FoundModel:
    """Return a checked model; fetch it first if it is not on this disk. Raises StartError."""
    with model_errors(), new_reader(settings) as reader:
        model = find_model(name, settings.models.folders, reader=reader)
        if not model.missing:
            check_found(reader, model, settings)
            return model
    pull_model(name, file, say, dry_run=False, force=False)
    return model
