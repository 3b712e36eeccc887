"""What coding tools read: their environment and their arguments.

Claude Code: code.claude.com/docs/en/model-config and env-vars. Codex: its config reference at
developers.openai.com/codex. opencode: opencode.ai/docs/providers and /config.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.cli.launch.jsonc import NotJsonError, has_member, set_member
from server.cli.launch.running_server import LaunchError, RunningServer

PROVIDER = ("language_models", "openai_compatible", "quire")
DEFAULT_MODEL = ("agent", "default_model")
BACKUP = ".before-quire"
AFTERWARDS = "Zed asks for a key once: any, where the server wants none"


def zed_settings_file() -> Path:
    """Return where Zed reads its settings. Raises RuntimeError where the user has no home."""
    chosen = os.environ.get("XDG_CONFIG_HOME") if sys.platform != "darwin" else None
    return (Path(chosen) if chosen else Path.home() / ".config") / "zed" / "settings.json"


def provider(server: RunningServer) -> dict[str, Any]:
    """Return Zed's settings of a server."""
    return {
        "api_url": f"{server.url}/v1",
        "available_models": [
            {
                "name": server.model,
                "max_tokens": server.context,
                "max_output_tokens": server.answer_tokens,
                "capabilities": {"tools": True, "images": False},
            }
        ],
    }


def with_server(text: str, server: RunningServer) -> str:
    """Return Zed's settings with a server in them. A model that was chosen stays chosen. Raises
    NotJsonError."""
    text = set_member(text, PROVIDER, provider(server))
    if has_member(text, DEFAULT_MODEL):
        return text
    return set_member(text, DEFAULT_MODEL, {"provider": "quire", "model": server.model})


def configure_zed(server: RunningServer, *, only_print: bool) -> str:
    """Write the server into Zed's settings, and keep the file that there was beside it. Return what
    was done, or would be. Raises LaunchError."""
    try:
        file = zed_settings_file()
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        new = with_server(old, server)
        if only_print:
            return f"{file} would be:\n{new.rstrip()}"
        if new == old:
            return f"{file} has this server already; {AFTERWARDS}"
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = ""
        if old:
            backup = file.with_name(file.name + BACKUP)
            # The first one is from before quire, whatever has been done since.
            if not backup.exists():
                backup.write_text(old, encoding="utf-8")
            kept = f" (the file of before is {backup})"
        file.write_text(new, encoding="utf-8")
    except NotJsonError as error:
        raise LaunchError(f"{file}: {error}; nothing was changed") from error
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise LaunchError(f"Zed's settings cannot be changed: {error}") from error
    return f"{file} has {server.model} at {server.url} now{kept}; {AFTERWARDS}"


# As long as a server may take for an answer (limits.max_request_s).
ANSWER_LIMIT_S = 3600
# Claude Code compacts a conversation when less than these tokens and an answer's are left of the
# context, and begins with a prompt and tools of about so many.
CLAUDE_RESERVE_TOKENS, CLAUDE_PROMPT_TOKENS = 13_000, 20_000
# Codex compacts when so much of the context is used.
CODEX_COMPACT_PART = 0.8
# A name that is none of quire's own variables: quire refuses those that it does not know.
KEY_VARIABLE = "KEY_OF_LOCAL_QUIRE"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a tool is started. environment: None takes a variable away."""

    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    secrets: frozenset[str] = frozenset()
    """Variables that are not to be shown."""
    warnings: tuple[str, ...] = field(default=())


Tool = Callable[[RunningServer, Mapping[str, str]], Launch]
"""Takes a server and the environment that there is."""


def claude(server: RunningServer, _: Mapping[str, str]) -> Launch:
    names: tuple[str, ...] = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    names += tuple(
        f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU", "FABLE")
    )
    # A variable that is empty is not taken for one that is missing everywhere.
    elsewhere = dict.fromkeys(
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    )
    return Launch(
        ("claude", "--model", server.model),
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            **dict.fromkeys(names, server.model),
            # It assumes 200000 for a name that it does not know.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer_tokens),
            # A line before the system prompt that changes: all behind it would be computed anew.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "API_TIMEOUT_MS": str(1000 * ANSWER_LIMIT_S),
            **elsewhere,
        },
        frozenset({"ANTHROPIC_AUTH_TOKEN"}),
        tuple(_doubts(server)),
    )


def _doubts(server: RunningServer) -> list[str]:
    doubts = []
    left = server.context - server.answer_tokens - CLAUDE_RESERVE_TOKENS
    if left < CLAUDE_PROMPT_TOKENS:
        doubts.append(
            f"a context of {server.context} tokens is little for Claude Code: its own prompt takes "
            f"about {CLAUDE_PROMPT_TOKENS}, and it compacts beyond {max(0, left)}; 48000 are enough"
        )
    if server.model.lower().startswith("claude"):
        doubts.append(
            f"Claude Code knows a context of its own for the name {server.model}, and not that of "
            "the server: serve it under another name"
        )
    return doubts


def codex(server: RunningServer, _: Mapping[str, str]) -> Launch:
    """Launch Codex, by settings on its command line; its file stays as it is."""
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
    # JSON's strings and numbers are TOML's, too.
    given = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    command = ("codex", *(word for setting in given for word in ("-c", setting)))
    return Launch(command, {KEY_VARIABLE: server.key}, frozenset({KEY_VARIABLE}))


def opencode(server: RunningServer, environment: Mapping[str, str]) -> Launch:
    """Launch opencode, by settings in its environment, which it reads after all its files. Raises
    LaunchError where there are some already that are no JSON."""
    variable = "OPENCODE_CONFIG_CONTENT"
    name = f"quire/{server.model}"
    ours = {
        "provider": {
            "quire": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "quire",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {
                    server.model: {
                        "name": server.model,
                        "limit": {"context": server.context, "output": server.answer_tokens},
                    }
                },
            }
        },
        "model": name,
        "small_model": name,
    }
    try:
        text = json.dumps(merged(dict(json.loads(environment.get(variable, "{}"))), ours))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{variable} is no JSON object: {error}") from error
    return Launch(
        ("opencode",), {variable: text, KEY_VARIABLE: server.key}, frozenset({KEY_VARIABLE})
    )


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return objects within each other as one; where both say something, what is new."""
    both = {**old, **new}
    for name in old.keys() & new.keys():
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            both[name] = merged(old[name], new[name])
    return both


TOOLS: dict[str, Tool] = {"claude": claude, "codex": codex, "opencode": opencode}
WHERE_TO_GET = {
    "claude": "https://code.claude.com/docs",
    "codex": "https://developers.openai.com/codex",
    "opencode": "https://opencode.ai",
}
