"""``quire launch``: start a coding tool with a running server's address, model and context. The
tools' settings are documented at code.claude.com/docs/en/model-config and env-vars (Claude Code),
developers.openai.com/codex (Codex, config reference), opencode.ai/docs/providers and /config
(opencode), and zed.dev/docs/ai/llm-providers (Zed)."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.sentences import say
from server.cli.settings import read_settings
from server.config import SettingError
from server.protocol.advice import advised_answer_tokens

ASK_TIMEOUT_S = 10.0
# The key that a tool gets for a server without keys: tools refuse an empty key.
ANY_KEY = "any"
# Seconds that tools wait for an answer: the default of the setting limits.max_request_s.
ANSWER_LIMIT_S = 3600
# Claude Code compacts a conversation once less of the context is free than one answer plus
# CLAUDE_RESERVE_TOKENS. Claude Code's own prompt and tools take about CLAUDE_PROMPT_TOKENS.
CLAUDE_RESERVE_TOKENS, CLAUDE_PROMPT_TOKENS = 13_000, 20_000
# Codex compacts a conversation that fills this part of the context.
CODEX_COMPACT_PART = 0.8
# The name does not begin with QUIRE_: quire refuses unknown variables with that prefix.
KEY_VARIABLE = "KEY_OF_LOCAL_QUIRE"
ZED = "zed"
ZED_BACKUP = ".before-quire"
ZED_KEY = "Zed asks for a key once: any, where the server wants none"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server. url: without /v1. context: most tokens of a prompt with its answer."""

    url: str
    key: str
    model: str
    context: int

    @property
    def answer_tokens(self) -> int:
        """The longest answer, in tokens, that a tool should request."""
        return advised_answer_tokens(self.context)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a tool. environment: None unsets a variable. secrets: names of variables."""

    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    secrets: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


def launch_command(app: typer.Typer) -> None:
    passed: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command("launch", context_settings=passed)
    def _launch(
        context: typer.Context,
        tool: Annotated[str, typer.Argument(help=f"One of {', '.join((*TOOLS, ZED))}.")],
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

        The tool gets address, model and context window. claude, codex and opencode are started, and
        their files stay as they are. Zed's settings are changed, or the needed change is printed.
        """
        if tool not in (*TOOLS, ZED):
            raise SettingError(f"{tool!r} is no tool that is known: {', '.join((*TOOLS, ZED))}")
        server = find_server(url, key, model)
        if tool == ZED:
            typer.echo(configure_zed(server, only_print=only_print))
        else:
            start = TOOLS[tool][0](server, os.environ)
            launch(start, context.args, server, only_print=only_print)


def launch(
    start: Launch, arguments: Sequence[str], server: RunningServer, *, only_print: bool
) -> None:
    """Replace this process by a tool's, or print the tool's command line. Raises SettingError."""
    tool = start.command[0]
    command = (*start.command, *arguments)
    for warning in start.warnings:
        say(warning)
    if only_print:
        typer.echo(as_shell(start, command))
        return
    program = shutil.which(tool)
    if program is None:
        raise SettingError(f"{tool} is not found on the PATH: {TOOLS[tool][1]}")
    say(f"{tool} with {server.model} at {server.url}, {server.context} tokens")
    environment = {**os.environ, **start.environment}
    given = {name: value for name, value in environment.items() if value is not None}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, given)  # noqa: S606
    except OSError as error:
        raise SettingError(f"{program}: {error.strerror}") from error


def as_shell(start: Launch, command: Sequence[str]) -> str:
    """Return the shell command that starts a tool, with ``...`` in place of secrets."""
    removed = [f"-u {name}" for name, value in start.environment.items() if value is None]
    given = [
        f"{name}={'...' if name in start.secrets and value != ANY_KEY else shlex.quote(value)}"
        for name, value in start.environment.items()
        if value is not None
    ]
    return " \\\n  ".join([*(["env", *removed] if removed else []), *given, shlex.join(command)])


def find_server(url: str | None, key: str | None, model: str | None) -> RunningServer:
    """Ask a server for its models and choose one. url: None means the address in the settings.
    model: None means the first loaded model, or else the first listed one. Raises StartError."""
    from server.cli.running import server_address

    settings = read_settings(None, {})
    key = key or settings.access.first_key or ANY_KEY
    url = (url or server_address(settings)).rstrip("/").removesuffix("/v1")
    models = {str(entry["id"]): entry for entry in models_of(url, key)}
    if not models:
        raise SettingError(f"{url} serves no model")
    loaded = [name for name, entry in models.items() if entry.get("loaded", True)]
    name = [*loaded, *models][0] if model is None else model
    if name not in models:
        raise SettingError(f"{url} does not serve {name!r}; it serves {', '.join(models)}")
    context = models[name].get("max_model_len")
    if not isinstance(context, int):
        raise SettingError(
            f"{url} does not tell how long a context of {name!r} may be: ask that model something, "
            "so that it is loaded, and try again"
        )
    return RunningServer(url, key, name, context)


def models_of(url: str, key: str) -> list[dict[str, Any]]:
    """Return the server's answer to GET /v1/models, a list of models. Raises SettingError."""
    import ssl

    import httpx2

    try:
        # No proxy: the server is mostly on this machine. The system's certificates are used.
        with httpx2.Client(
            timeout=ASK_TIMEOUT_S, trust_env=False, verify=ssl.create_default_context()
        ) as client:
            answer = client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    except httpx2.UnsupportedProtocol as error:
        raise SettingError(f"{url}: an address is written http://127.0.0.1:8000") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise SettingError(
            f"nothing answers at {url} ({error}): start `quire serve MODEL`, or name the address "
            "of another server with --url"
        ) from error
    status = answer.status_code
    if status in (401, 403):
        raise SettingError(f"{url} wants another key ({status}): --key, or access.api_keys")
    try:
        entries: list[dict[str, Any]] = answer.json()["data"]
        return [dict(entry) for entry in entries if "id" in entry]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{url} answers GET /v1/models with {status}, and no list") from error


def zed_settings_file() -> Path:
    """Raises RuntimeError if the user has no home folder."""
    chosen = os.environ.get("XDG_CONFIG_HOME") if sys.platform != "darwin" else None
    return (Path(chosen) if chosen else Path.home() / ".config") / "zed" / "settings.json"


def configure_zed(server: RunningServer, *, only_print: bool) -> str:
    """Add the server to Zed's settings file, after a backup. Do not change a file with comments:
    json would drop the comments. Return a text for the user. Raises SettingError."""
    model = {
        "name": server.model,
        "max_tokens": server.context,
        "max_output_tokens": server.answer_tokens,
        "capabilities": {"tools": True, "images": False},
    }
    provider = {"api_url": f"{server.url}/v1", "available_models": [model]}
    ours = {"language_models": {"openai_compatible": {"quire": provider}}}
    default = {"agent": {"default_model": {"provider": "quire", "model": server.model}}}
    try:
        file = zed_settings_file()
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        try:
            old = dict(json.loads(text or "{}"))
        except (ValueError, TypeError):
            return (
                f"{file} has comments, or is no JSON, and was not changed; add this to it:\n"
                f"{_as_json(ours | default)}\n{ZED_KEY}"
            )
        # Keep the user's own default model, if there is one.
        new = merged(old | merged(default, old), ours)
        if only_print:
            return f"{file} would be:\n{_as_json(new)}"
        if new == old:
            return f"{file} has this server already; {ZED_KEY}"
        file.parent.mkdir(parents=True, exist_ok=True)
        kept, backup = "", file.with_name(file.name + ZED_BACKUP)
        if text:
            kept = f" (the file of before is {backup})"
            # Never overwrite a backup: a later settings file has quire's changes in it.
            if not backup.exists():
                backup.write_text(text, encoding="utf-8")
        file.write_text(f"{_as_json(new)}\n", encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise SettingError(f"Zed's settings cannot be changed: {error}") from error
    return f"{file} has {server.model} at {server.url} now{kept}; {ZED_KEY}"


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False)


def claude(server: RunningServer, _: Mapping[str, str]) -> Launch:
    models = ["ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU", "FABLE")]
    # These variables are removed: some tools treat an empty variable as set.
    elsewhere = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    environment: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(models, server.model),
        # Claude Code assumes 200000 tokens for a model name that it does not know.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer_tokens),
        # 0 drops a line before the system prompt. Its changes would invalidate cached prefixes.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "API_TIMEOUT_MS": str(1000 * ANSWER_LIMIT_S),
        **dict.fromkeys(elsewhere),
    }
    command, secrets = ("claude", "--model", server.model), frozenset({"ANTHROPIC_AUTH_TOKEN"})
    return Launch(command, environment, secrets, tuple(_doubts(server)))


def _doubts(server: RunningServer) -> list[str]:
    doubts = []
    left = server.context - server.answer_tokens - CLAUDE_RESERVE_TOKENS
    if left < CLAUDE_PROMPT_TOKENS:
        compacts = f"it compacts beyond {left}" if left > 0 else "it would compact at once"
        doubts.append(
            f"a context of {server.context} tokens is little for Claude Code: its own prompt takes "
            f"about {CLAUDE_PROMPT_TOKENS}, and {compacts}; 48000 are enough"
        )
    if server.model.lower().startswith("claude"):
        doubts.append(
            f"Claude Code knows a context of its own for the name {server.model}, and not that of "
            "the server: serve it under another name"
        )
    return doubts


def codex(server: RunningServer, _: Mapping[str, str]) -> Launch:
    """Launch Codex with settings on the command line, so that Codex's own file stays unchanged."""
    provider = {
        "name": "quire",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": 1000 * ANSWER_LIMIT_S,
    }
    settings = {
        "model": server.model,
        "model_provider": "quire",
        "model_context_window": server.context,
        "model_auto_compact_token_limit": int(server.context * CODEX_COMPACT_PART),
        **{f"model_providers.quire.{name}": value for name, value in provider.items()},
    }
    # Strings and numbers in JSON are valid TOML.
    given = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    command = ("codex", *(word for setting in given for word in ("-c", setting)))
    return Launch(command, {KEY_VARIABLE: server.key}, frozenset({KEY_VARIABLE}))


def opencode(server: RunningServer, environment: Mapping[str, str]) -> Launch:
    """Launch opencode with settings in an environment variable, which opencode reads last. Raises
    SettingError if that variable is set to something other than a JSON object."""
    variable, name = "OPENCODE_CONFIG_CONTENT", f"quire/{server.model}"
    limit = {"context": server.context, "output": server.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "quire",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    ours = {"provider": {"quire": provider}, "model": name, "small_model": name}
    try:
        text = json.dumps(merged(dict(json.loads(environment.get(variable, "{}"))), ours))
    except (ValueError, TypeError) as error:
        raise SettingError(f"{variable} is no JSON object: {error}") from error
    return Launch(
        ("opencode",), {variable: text, KEY_VARIABLE: server.key}, frozenset({KEY_VARIABLE})
    )


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge two JSON objects and their nested objects; values of ``new`` win."""
    both = {**old, **new}
    for name in old.keys() & new.keys():
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            both[name] = merged(old[name], new[name])
    return both


# Tool -> function that returns the tool's Launch, and web page with install instructions.
TOOLS: dict[str, tuple[Callable[[RunningServer, Mapping[str, str]], Launch], str]] = {
    "claude": (claude, "https://code.claude.com/docs"),
    "codex": (codex, "https://developers.openai.com/codex"),
    "opencode": (opencode, "https://opencode.ai"),
}
