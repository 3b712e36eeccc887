"""Settings come from a file, the environment and flags, and whatever is wrong is named."""

import re
from pathlib import Path

import pytest

from server.cli import settings as module
from server.cli.settings import read_settings, with_further
from server.config import MIB, Config, SettingError, engine_config
from tests.models import TINY, write_config
from tests.server.commands import SETTINGS, Run, one_sentence


def test_settings_come_from_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text("[server]\nport = 1\n[cache]\nkv_budget = '1GiB'\n")
    settings = read_settings(file, {"server": {"port": 2, "host": None}})
    assert (settings.server.port, settings.server.host) == (2, "127.0.0.1")
    assert engine_config(settings).kv_budget_bytes == 1024 * MIB


def test_drafts_may_be_switched_off() -> None:
    assert engine_config(read_settings(None, {})).drafts
    assert not engine_config(read_settings(None, with_further({}, ["engine.drafts=off"]))).drafts


def test_prefixes_on_disk_have_a_bound_and_a_folder() -> None:
    given = read_settings(None, with_further({}, ["cache.disk=0", "cache.disk_folder=~/prefixes"]))
    assert engine_config(read_settings(None, {})).disk_bytes is None
    config = engine_config(given)
    assert (config.disk_bytes, config.disk_folder) == (0, "~/prefixes")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[server]\nport = 'x'\n", "server.port: "),
        ("[server]\nprot = 1\n", "server.prot: "),
        ("[sever]\nport = 1\n", "sever: "),
        ("port = 1\n", "port: "),
        ("server = 1\n", "server: it must be a table"),
        ("[server", ""),
        ("\xff", "'utf-8' codec can't decode"),
        *[
            (f"{begin}{'[' * depth}", "a value nests too deep")
            for depth in (5_000, 100_000)
            for begin in ("[server]\nport = ", "a = [{b = ", "x = [1, ")
        ],
        (None, "No such file or directory"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    file = tmp_path / "quire.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingError) as caught:
        read_settings(file, {"server": {"port": 2}})  # a flag that would win
    assert str(caught.value).startswith(f"{file}: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("QUIRE_SERVER__PORT", "x", "setting server.port: "),
        ("QUIRE_SERVER__PORT", "-1", "setting server.port: "),
        ("QUIRE_CACHE__KV_BUDGET", "3 parsecs", "setting cache.kv_budget: "),
        ("QUIRE_SERVER", "port 7", "environment: "),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError) as caught:
        read_settings(None, {})
    assert str(caught.value).startswith(problem)
    assert "server" in str(caught.value) or "kv_budget" in str(caught.value)


@pytest.mark.parametrize("section", ["SERVER", "MODELS", "ACCESS", "LIMITS", "LOG", "CACHE"])
def test_a_variable_that_nests_too_deep_is_said(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"QUIRE_{section}", '{"a":' * 20_000)
    with pytest.raises(SettingError, match=r"^environment: a value nests too deep$"):
        read_settings(None, {})


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("server.port", 70000, "at most 65535"),
        ("server.port", "x", "a whole number"),
        ("server.port", 1.5, "a whole number"),
        ("server.port", -1, "at least 0"),
        ("server.sse_ping_s", 0, "more than 0"),
        ("server.ready_timeout_s", 0, "more than 0"),
        ("limits.max_queued_requests", -1, "at least 0"),
        ("engine.max_num_seqs", 0, "at least 1"),
        ("engine.max_num_batched_tokens", 0, "at least 1"),
        ("engine.max_model_len", 1, "at least 2"),
        ("engine.step_time_target_ms", 0, "more than 0"),
        ("log.format", "xml", "one of 'text' or 'json'"),
        ("cache.dtype", "float64", "one of"),
        ("server.port", "9" * 5000, "a whole number"),
        ("server.drain_s", "inf", "a whole number"),
        ("log.level", "loud", "one of 'debug', 'info', 'warning' or 'error'"),
        ("server.page", "perhaps", "true or false"),
        ("limits.max_template_s", 0, "more than 0"),
        ("limits.max_template_s", "soon", "a number"),
        ("engine.threads", -1, "at least 1"),
        ("server.host", 5, "a text"),
        ("log.file", 3, "a path"),
        ("models.pinned", 4, "a list"),
        ("models.aliases", "x", "a table"),
    ],
)
def test_the_rule_that_a_value_breaks_is_told_in_plain_words(
    setting: str, value: object, rule: str
) -> None:
    section, _, field = setting.partition(".")
    with pytest.raises(SettingError) as caught:
        read_settings(None, {section: {field: value}})
    assert str(caught.value).startswith(f"setting {setting}: it must be {rule}")


@pytest.mark.parametrize("value", ["sparse", "paged", "dense", "posix", "auto"])
def test_a_variable_forces_the_kv_backend(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE__KV_BACKEND", value)
    assert engine_config(read_settings(None, {})).kv_backend == value
    posix = read_settings(None, {"cache": {"kv_backend": "posix"}})
    assert engine_config(posix).kv_backend == "posix"


def test_any_setting_may_be_set_by_its_name() -> None:
    flags = with_further(
        {"limits": {"max_messages": 3}}, ["limits.max_choices=2", "access.allowed_hosts=a.b,c=d"]
    )
    settings = read_settings(None, flags)
    assert (settings.limits.max_messages, settings.limits.max_choices) == (3, 2)
    assert settings.access.allowed_hosts == ("a.b", "c=d")


@pytest.mark.parametrize("written", ["max_choices=2", "limits.max_choices", "", "a"])
def test_a_setting_that_is_written_otherwise_is_refused_without_its_value(written: str) -> None:
    with pytest.raises(SettingError, match=r"SECTION\.NAME=VALUE") as caught:
        with_further({}, [written])
    assert "=2" not in str(caught.value)


# --- names ------------------------------------------------------------------------------------


SECRET = "sk-zebra-canary-0123456789"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("QUIRE_ACCES__API_KEYS", "QUIRE_ACCESS__API_KEYS"),
        ("QUIRE_ACCESS_API_KEYS", "QUIRE_ACCESS__API_KEYS"),
        ("QUIRE_API_KEYS", "QUIRE_ACCESS__API_KEYS"),
        ("quire_api_keys", "QUIRE_ACCESS__API_KEYS"),
        ("QUIRE_PORT", "QUIRE_SERVER__PORT"),
        ("QUIRE_SERVER_PORT", "QUIRE_SERVER__PORT"),
        ("QUIRE_SERVR__PORT", "QUIRE_SERVER__PORT"),
        ("QUIRE_SERVER__PROT", "QUIRE_SERVER__PORT"),
        ("QUIRE_SERVER__PORT__X", "QUIRE_SERVER__PORT"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan", "doctor"])
def test_a_misspelt_variable_ends_the_start_and_its_value_is_not_told(
    command: str,
    variable: str,
    meant: str,
    quire: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, SECRET)
    model = [] if command == "doctor" else [write_config(tmp_path, TINY)]
    result = quire(command, *model)
    line = one_sentence(result, SETTINGS)
    assert line.startswith(f"quire: environment: {variable} is no setting; did you mean {meant}? ")
    assert line.endswith("`quire settings` prints all of them")
    assert "zebra" not in result.output


def test_a_variable_that_is_like_no_setting_is_refused_with_the_list(
    quire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ZEBRA", SECRET)
    line = one_sentence(quire("serve", write_config(tmp_path, TINY)), SETTINGS)
    said = "quire: environment: QUIRE_ZEBRA is no setting; `quire settings` prints all of them"
    assert line == said


def test_other_programs_variables_and_right_ones_are_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRK_PORT", "1")
    monkeypatch.setenv("quire_server__port", "7")
    monkeypatch.setenv("QUIRE_LOG", '{"level": "error"}')
    settings = read_settings(None, {})
    assert (settings.server.port, settings.log.level) == (7, "error")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cache.kv_budgett", "cache.kv_budget"),
        ("server.prot", "server.port"),
        ("limits.max_message", "limits.max_messages"),
        ("server.log_level", "log.level"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(
    name: str, meant: str, quire: Run, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, TINY)
    hint = f"there is no such setting; did you mean {meant}? `quire settings` prints all of them"
    line = one_sentence(quire("serve", folder, "--set", f"{name}={SECRET}"), SETTINGS)
    assert line == f"quire: setting {name}: {hint}"
    section, _, field = name.partition(".")
    file = tmp_path / "quire.toml"
    file.write_text(f"[{section}]\n{field} = '{SECRET}'\n")
    line = one_sentence(quire("serve", folder, "--config", file), SETTINGS)
    assert line == f"quire: {file}: {name}: {hint}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sever]\nport = 1\n", "sever: there is no such setting; did you mean server? "),
        ("port = 1\n", "port: there is no such setting; did you mean server.port? "),
        ("zebra = 1\n", "zebra: there is no such setting; `quire settings` prints"),
    ],
)
def test_an_unknown_table_or_a_setting_outside_of_its_table_is_refused_likewise(
    text: str, said: str, quire: Run, tmp_path: Path
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(text)
    folder = write_config(tmp_path / "model", TINY)
    line = one_sentence(quire("serve", folder, "--config", file), SETTINGS)
    assert line.startswith(f"quire: {file}: {said}")


# --- the user's own file ----------------------------------------------------------------------


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is read from."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "quire" / "quire.toml"
    file.parent.mkdir()
    return file


def test_the_users_own_file_is_read_and_environment_and_flags_win(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_file.write_text('[server]\nport = 9001\nhost = "localhost"\ndrain_s = 7\n')
    monkeypatch.setenv("QUIRE_SERVER__HOST", "::1")
    server = read_settings(None, {"server": {"port": 9002}}).server
    assert (server.port, server.host, server.drain_s) == (9002, "::1", 7)


def test_a_file_that_is_named_is_read_instead_of_the_users_own(
    own_file: Path, tmp_path: Path
) -> None:
    own_file.write_text("[server]\nport = 9001\ndrain_s = 7\n")
    named = tmp_path / "named.toml"
    named.write_text("[server]\nport = 9003\n")
    server = read_settings(named, {}).server
    assert (server.port, server.drain_s) == (9003, 20)


def test_nobody_needs_a_file_of_their_own(own_file: Path) -> None:
    assert read_settings(None, {}) == Config()
    own_file.parent.rmdir()
    own_file.parent.touch()
    assert read_settings(None, {}) == Config()


def test_what_is_wrong_in_the_users_own_file_names_the_file(own_file: Path) -> None:
    own_file.write_text("[server]\nprot = 9001\n")
    with pytest.raises(SettingError, match=re.escape(f"{own_file}: server.prot: ")):
        read_settings(None, {})
    own_file.unlink()
    own_file.mkdir()
    with pytest.raises(SettingError, match=re.escape(f"{own_file}: Is a directory")):
        read_settings(None, {})


def test_the_path_of_the_users_own_file_is_printed(quire: Run, own_file: Path) -> None:
    result = quire("settings", "--path")
    assert (result.exit_code, result.stdout) == (0, f"{own_file}\n")


def test_without_a_home_there_is_no_file_of_ones_own(
    quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module, "config_folder", homeless)
    assert read_settings(None, {}) == Config()
    assert "there is no home folder" in one_sentence(quire("settings", "--path"), SETTINGS)
