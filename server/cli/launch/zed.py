"""Zed's settings: zed.dev/docs/ai/llm-providers, OpenAI API compatible."""

import os
import sys
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
