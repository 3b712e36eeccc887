"""``quire launch``: stand-ins for the tools say what they were started with."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.cli.launch import (
    KEY_VARIABLE,
    RunningServer,
    claude,
    codex,
    find_server,
    opencode,
    zed_settings_file,
)
from server.config import SettingError
from tests.clients.servers import QUIRE, run_to_end
from tests.server.commands import SETTINGS, Run, StandIn, one_sentence

KEY = "a-key-of-sixteen-characters"
TELL = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}))
"""


class Models(StandIn):
    """A server that tells its models to whoever has its key."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Any = {"data": [self.model("org/Qwen3-4B", 65536), self.model("small", 4096)]}
        self.key = "any"
        self.asked: list[str] = []

    def answer(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        self.asked.append(path)
        return 200 if key == f"Bearer {self.key}" else 401, self.told

    @staticmethod
    def model(name: str, context: int) -> dict[str, Any]:
        return {"id": name, "max_model_len": context}


@pytest.fixture
def models() -> Iterator[Models]:
    with Models() as started:
        yield started


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of them, and nothing of ours in the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tell.py").write_text(TELL)
    for name in ("claude", "codex", "opencode"):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {folder}/tell.py "$@"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("OPENCODE_CONFIG_CONTENT", "ANTHROPIC_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def launched(*arguments: str) -> dict[str, Any]:
    """What a tool that ``quire launch`` started says of itself."""
    done = run_to_end(QUIRE, "launch", *arguments)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def server(context: int = 65536, model: str = "org/Qwen3-4B") -> RunningServer:
    return RunningServer("http://127.0.0.1:8000", KEY, model, context)


# --- started ----------------------------------------------------------------------------------


def test_claude_code_is_started_with_address_model_and_context(
    models: Models, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-somebody-else")
    said = launched("claude", "--url", models.url, "--", "--continue", "-p", "hello there")
    assert said["arguments"] == ["--model", "org/Qwen3-4B", "--continue", "-p", "hello there"]
    environment = said["environment"]
    assert environment["ANTHROPIC_BASE_URL"] == models.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "any"
    assert "ANTHROPIC_API_KEY" not in environment
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    for size in ("OPUS", "SONNET", "HAIKU", "FABLE"):
        assert environment[f"ANTHROPIC_DEFAULT_{size}_MODEL"] == "org/Qwen3-4B"


def test_codex_is_started_with_a_provider_on_its_command_line(models: Models, tools: Path) -> None:
    said = launched("codex", "--url", f"{models.url}/v1/", "--model", "small", "exec", "-x")
    given = said["arguments"]
    assert given[-2:] == ["exec", "-x"]
    assert set(given[:-2:2]) == {"-c"}
    read = tomllib.loads("\n".join(given[1:-2:2]))
    assert (read["model"], read["model_provider"]) == ("small", "quire")
    assert (read["model_context_window"], read["model_auto_compact_token_limit"]) == (4096, 3276)
    provider = read["model_providers"]["quire"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{models.url}/v1", "responses")
    assert said["environment"][provider["env_key"]] == "any"


def test_opencode_is_started_with_a_provider_beside_what_it_was_told_before(
    models: Models, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"share": "disabled", "provider": {"other": {"name": "Other"}}, "model": "other/x"}
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", json.dumps(before))
    said = launched("opencode", "--url", models.url)
    assert said["arguments"] == []
    read = json.loads(said["environment"]["OPENCODE_CONFIG_CONTENT"])
    assert (read["share"], read["model"]) == ("disabled", "quire/org/Qwen3-4B")
    assert read["provider"]["other"] == {"name": "Other"}
    ours = read["provider"]["quire"]
    assert ours["options"] == {
        "baseURL": f"{models.url}/v1",
        "apiKey": "{env:KEY_OF_LOCAL_QUIRE}",
    }
    assert ours["models"]["org/Qwen3-4B"]["limit"] == {"context": 65536, "output": 16384}
    assert said["environment"][KEY_VARIABLE] == "any"


def test_opencode_may_have_been_told_of_the_same_server_before() -> None:
    first = opencode(server(), {}).environment["OPENCODE_CONFIG_CONTENT"]
    assert first is not None
    again = opencode(server(4096), {"OPENCODE_CONFIG_CONTENT": first}).environment
    read = json.loads(again["OPENCODE_CONFIG_CONTENT"] or "")
    models = read["provider"]["quire"]["models"]
    assert models["org/Qwen3-4B"]["limit"] == {"context": 4096, "output": 1024}


def test_what_opencode_was_told_before_is_refused_if_it_is_no_object() -> None:
    for wrong in ("{", "[1]", "7"):
        with pytest.raises(SettingError, match="OPENCODE_CONFIG_CONTENT is no JSON object"):
            opencode(server(), {"OPENCODE_CONFIG_CONTENT": wrong})


def test_names_with_quotes_and_accents_are_written_so_that_codex_reads_them() -> None:
    name = 'é"\\modèle🙂'
    given = codex(server(model=name), {}).command[2::2]
    assert tomllib.loads("\n".join(given))["model"] == name


def test_too_little_context_for_claude_code_is_said() -> None:
    assert claude(server(65536), {}).warnings == ()
    (warning,) = claude(server(32768), {}).warnings
    assert "a context of 32768 tokens is little" in warning
    assert "compacts beyond 11576" in warning


@pytest.mark.parametrize("context", [512, 2048, 4096, 8192, 16384, 17333])
def test_a_context_that_claude_code_has_filled_before_its_first_turn_is_said(context: int) -> None:
    (warning,) = claude(server(context), {}).warnings
    assert "and it would compact at once;" in warning


def test_a_warning_is_said_before_the_tool_is_started(
    quire: Run, models: Models, tools: Path
) -> None:
    said = quire("launch", "claude", "--print", "--url", models.url, "--model", "small")
    assert said.exit_code == 0
    assert said.stderr.startswith("quire: a context of 4096 tokens is little for Claude Code")


def test_a_name_whose_context_claude_code_knows_otherwise_is_said() -> None:
    (warning,) = claude(server(model="claude-sonnet"), {}).warnings
    assert "serve it under another name" in warning


# --- which server -----------------------------------------------------------------------------


def test_address_and_key_are_those_of_the_settings(
    quire: Run, models: Models, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.key = KEY
    monkeypatch.setenv("QUIRE_SERVER__PORT", str(models.port))
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", KEY)
    for host in ("127.0.0.1", "0.0.0.0"):
        monkeypatch.setenv("QUIRE_SERVER__HOST", host)
        said = quire("launch", "claude", "--print")
        assert said.exit_code == 0, said.output
        assert f"ANTHROPIC_BASE_URL={models.url} " in said.stdout
    assert models.asked == ["/v1/models"] * 2


def test_ipv6_addresses_are_written_in_brackets(
    quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_SERVER__HOST", "::1")
    monkeypatch.setenv("QUIRE_SERVER__PORT", "1")
    said = one_sentence(quire("launch", "claude"), SETTINGS)
    assert "nothing answers at http://[::1]:1 (" in said


def test_what_is_printed_can_be_typed_and_shows_no_key(
    quire: Run, models: Models, tools: Path
) -> None:
    models.key = KEY
    said = quire("launch", "claude", "--print", "--key", KEY, "--url", models.url, "--", "a b")
    assert KEY not in said.output
    assert said.stdout.endswith("claude --model org/Qwen3-4B 'a b'\n")
    models.key = "any"
    typed = quire("launch", "codex", "--print", "--url", models.url).stdout
    done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["environment"][KEY_VARIABLE] == "any"
    assert 'model="org/Qwen3-4B"' in told["arguments"]


def test_of_several_models_one_that_is_loaded_is_taken(models: Models) -> None:
    entries = [models.model("cold", 4096), models.model("warm", 8192), models.model("hot", 1024)]
    for entry, loaded in zip(entries, (False, True, True), strict=True):
        entry["loaded"] = loaded
    models.told = {"data": entries}
    assert find_server(models.url, "any", None).model == "warm"
    assert find_server(models.url, "any", "cold").context == 4096
    models.told = {"data": entries[:1]}
    assert find_server(models.url, "any", None).model == "cold"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"data": []}, "serves no model"),
        ({"data": [{"id": "gpt"}]}, "does not tell how long a context of 'gpt' may be"),
        ({"models": []}, "answers GET /v1/models with 200, and no list"),
        ([], "and no list"),
    ],
)
def test_a_server_of_another_kind_is_told_apart(
    answer: object, reason: str, models: Models
) -> None:
    models.told = answer
    with pytest.raises(SettingError, match=reason):
        find_server(models.url, "any", None)


def test_what_is_wrong_with_the_request_is_said_in_one_sentence(
    quire: Run, models: Models, tools: Path
) -> None:
    url = ("--url", models.url)
    cases: list[tuple[tuple[str, ...], str]] = [
        (("vim", *url), "'vim' is no tool that is known: claude, codex, opencode, zed"),
        (("claude", *url, "--key", "wrong"), "wants another key (401)"),
        (("claude", *url, "--model", "x"), "does not serve 'x'; it serves org/Qwen3-4B, small"),
        (("claude", "--url", "localhost:8000"), "an address is written http://"),
        (("claude", "--url", "https://127.0.0.1:1"), "nothing answers at https://127.0.0.1:1 ("),
        (("claude", "--url", "http://127.0.0.1:99999"), "nothing answers at"),
    ]
    for arguments, reason in cases:
        assert reason in one_sentence(quire("launch", *arguments), SETTINGS)


def test_a_tool_that_is_not_there_is_said_with_where_to_get_it(
    quire: Run, models: Models, tools: Path
) -> None:
    (tools / "codex").unlink()
    said = one_sentence(quire("launch", "codex", "--url", models.url), SETTINGS)
    assert "codex is not found on the PATH: https://" in said


def test_a_tool_that_cannot_be_started_is_said(
    quire: Run, models: Models, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(8, "Exec format error")

    monkeypatch.setattr(os, "execve", fails)
    monkeypatch.setenv("QUIRE_SERVER__PORT", str(models.port))
    said = quire("launch", "claude")
    assert said.exit_code == SETTINGS
    assert "claude: Exec format error" in said.stderr


# --- Zed --------------------------------------------------------------------------------------

SETTINGS_OF_ZED: dict[str, Any] = {
    "theme": "One Dark",
    "language_models": {"ollama": {"api_url": "http://localhost:11434"}},
    "agent": {"dock": "left"},
    "vim_mode": True,
}


@pytest.fixture
def zed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "zed" / "settings.json"


def configure(quire: Run, models: Models, *flags: str) -> str:
    result = quire("launch", "zed", "--url", models.url, *flags)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_zed_has_the_server_and_keeps_every_other_setting(
    quire: Run, models: Models, zed_file: Path
) -> None:
    zed_file.parent.mkdir(parents=True)
    zed_file.write_text(json.dumps(SETTINGS_OF_ZED))
    backup = zed_file.with_name("settings.json.before-quire")
    assert f"(the file of before is {backup})" in configure(quire, models)
    new = json.loads(zed_file.read_text())
    assert list(new) == list(SETTINGS_OF_ZED)
    assert (new["theme"], new["vim_mode"], new["agent"]["dock"]) == ("One Dark", True, "left")
    assert new["language_models"]["ollama"] == SETTINGS_OF_ZED["language_models"]["ollama"]
    provider = new["language_models"]["openai_compatible"]["quire"]
    assert provider["api_url"] == f"{models.url}/v1"
    assert provider["available_models"][0]["max_tokens"] == 65536
    assert new["agent"]["default_model"] == {"provider": "quire", "model": "org/Qwen3-4B"}
    assert json.loads(backup.read_text()) == SETTINGS_OF_ZED
    assert "has this server already" in configure(quire, models)
    assert json.loads(zed_file.read_text()) == new
    configure(quire, models, "--model", "small")
    changed = json.loads(zed_file.read_text())
    (model,) = changed["language_models"]["openai_compatible"]["quire"]["available_models"]
    assert model["max_tokens"] == 4096
    assert changed["agent"]["default_model"]["model"] == "org/Qwen3-4B", "what was chosen stays"
    assert json.loads(backup.read_text()) == SETTINGS_OF_ZED, "it is from before quire"


@pytest.mark.parametrize(
    "text", ['// Zed settings\n{"theme": "One Dark",}\n', '{"theme": \n}', "7"]
)
def test_zed_settings_with_comments_stay_as_they_are_and_the_addition_is_printed(
    text: str, quire: Run, models: Models, zed_file: Path
) -> None:
    zed_file.parent.mkdir(parents=True)
    zed_file.write_text(text)
    said = configure(quire, models)
    assert said.startswith(f"{zed_file} has comments, or is no JSON, and was not changed")
    addition = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert addition["agent"]["default_model"] == {"provider": "quire", "model": "org/Qwen3-4B"}
    provider = addition["language_models"]["openai_compatible"]["quire"]
    assert provider["api_url"] == f"{models.url}/v1"
    assert zed_file.read_text() == text
    assert list(zed_file.parent.iterdir()) == [zed_file]


def test_zed_without_settings_gets_some(quire: Run, models: Models, zed_file: Path) -> None:
    said = configure(quire, models)
    assert "before" not in said
    read = json.loads(zed_file.read_text())
    (model,) = read["language_models"]["openai_compatible"]["quire"]["available_models"]
    assert (model["name"], model["max_tokens"]) == ("org/Qwen3-4B", 65536)
    assert read["agent"]["default_model"] == {"provider": "quire", "model": "org/Qwen3-4B"}


def test_what_zed_would_get_is_printed_and_not_written(
    quire: Run, models: Models, zed_file: Path
) -> None:
    said = configure(quire, models, "--print")
    assert said.startswith(f"{zed_file} would be:\n{{")
    assert not zed_file.exists()


def test_zed_settings_that_nobody_can_read_are_said(
    quire: Run, models: Models, zed_file: Path
) -> None:
    zed_file.parent.mkdir(parents=True)
    zed_file.write_bytes(b"\xff")
    said = one_sentence(quire("launch", "zed", "--url", models.url), SETTINGS)
    assert "Zed's settings cannot be changed: " in said


@pytest.mark.parametrize(("platform", "chosen"), [("darwin", False), ("linux", True)])
def test_zeds_settings_are_where_zed_looks(
    platform: str, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "chosen"))
    folder = "chosen" if chosen else ".config"
    assert zed_settings_file() == tmp_path / folder / "zed" / "settings.json"
