"""``quire service`` against stand-ins for launchctl and systemctl."""

import os
import plistlib
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import service
from server.cli.cluster_folder import cluster_folder, ensure_key
from server.cli.service import (
    CLUSTER_STOP_GRACE_S,
    KEPT_VARIABLES,
    LABEL,
    STOP_GRACE_S,
    UNIT,
    ServiceDefinition,
    plist,
    quire_command,
    unit,
)
from server.config import SettingError
from tests.clients.servers import run_to_end
from tests.server.commands import SETTINGS, Run, one_sentence

Tool = Callable[[str], None]
AWKWARD = ("/opt/a b/quire", "serve", 'mo"del', "50%", "$HOME", "back\\slash", "a;b")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's, who has set nothing."""
    for name in KEPT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """What the tools were told, a line for each call."""
    return tmp_path / "said"


@pytest.fixture
def tools(tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a tool that notes what it is told, and then runs lines of sh."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, script: str = "") -> None:
        tool = folder / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(said))}\n{script}\n')
        tool.chmod(0o755)

    return make


@pytest.fixture
def linux(home: Path, tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's systemd, and where its unit is."""
    monkeypatch.setattr(sys, "platform", "linux")
    tools("systemctl")
    return home / ".config/systemd/user" / UNIT


# Whether the agent is loaded is whether a file is there.
LAUNCHCTL = """
loaded="$HOME/loaded"
case "$1" in
    print) test -e "$loaded" || exit 113; printf '\\tstate = running\\n\\tlast exit code = 0\\n' ;;
    bootstrap) test ! -e "$loaded" || exit 5; touch "$loaded" ;;
    bootout) rm "$loaded" ;;
esac
"""


@pytest.fixture
def mac(home: Path, tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's launchd, and where its property list is."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("server.cli.service.FREE_POLL_S", 0.01)
    tools("launchctl", LAUNCHCTL)
    return home / "Library/LaunchAgents" / f"{LABEL}.plist"


def exec_start(file: Path) -> str:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("ExecStart=")]
    return line


# --- texts ------------------------------------------------------------------------------------


def test_a_property_list_says_what_launchd_wants_to_know() -> None:
    made = ServiceDefinition(AWKWARD, {"HF_HOME": "/m & n"}, Path("/log"), 60)
    read = plistlib.loads(plist(made))
    assert read["ProgramArguments"] == list(AWKWARD)
    assert read["EnvironmentVariables"] == {"HF_HOME": "/m & n"}
    assert read["KeepAlive"] == {"SuccessfulExit": False}
    assert read["RunAtLoad"] is True
    assert read["ProcessType"] == "Interactive"
    assert read["ExitTimeOut"] == 60
    assert read["StandardErrorPath"] == "/log/service.err"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path) -> None:
    command = (sys.executable, *AWKWARD[1:])
    file = tmp_path / UNIT
    file.write_text(unit(ServiceDefinition(command, {"HF_HOME": "/a b$c%d"}, tmp_path, 60)))
    assert verified(file) == ""
    file.write_text(file.read_text().replace("TimeoutStopSec=60", "TimeoutStopSec=soon"))
    assert "Failed to parse" in verified(file), "it looks"


def verified(file: Path) -> str:
    """What systemd says of a unit."""
    runtime = {"HOME": str(file.parent), "XDG_RUNTIME_DIR": str(file.parent)}
    environment = runtime | {"PATH": os.environ["PATH"]}
    return run_to_end("systemd-analyze", "--user", "verify", file, env=environment).stderr


def test_a_unit_has_words_as_they_were_given() -> None:
    text = unit(ServiceDefinition(AWKWARD, {"HF_HOME": "/a b$c%d"}, Path("/log"), 60))
    assert (
        'ExecStart="/opt/a b/quire" "serve" "mo\\"del" "50%%" "$$HOME" "back\\\\slash" "a;b"\n'
    ) in text
    assert 'Environment="HF_HOME=/a b$c%%d"\n' in text
    assert "TimeoutStopSec=60\n" in text


# --- systemd ----------------------------------------------------------------------------------


def test_a_unit_is_installed_with_the_arguments_that_follow(
    quire: Run, linux: Path, said: Path, home: Path
) -> None:
    result = quire("service", "install", "--", "org/name", "--port", "8123", "--kv-budget", "1GiB")
    assert result.exit_code == 0, result.output
    log = home / ".local/state/quire/log/quire.log"
    assert exec_start(linux) == (
        f'ExecStart="{quire_command()}" "serve" "org/name" "--port" "8123" "--kv-budget" "1GiB" '
        f'"--set" "log.file={log}"'
    )
    assert f"TimeoutStopSec={20 + STOP_GRACE_S}\n" in linux.read_text()
    assert linux.stat().st_mode & 0o777 == 0o600, "arguments may be secrets"
    assert said.read_text().splitlines() == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        f"systemctl --user enable {UNIT}",
        f"systemctl --user restart {UNIT}",
    ]
    assert "loginctl enable-linger" in result.stdout
    assert f"serves on http://127.0.0.1:8123, if its model can be served: the log is {log}" in (
        result.stdout
    )


def test_a_service_waits_longer_than_the_drain_and_keeps_a_log_file_that_was_chosen(
    quire: Run, linux: Path, tmp_path: Path
) -> None:
    chosen = tmp_path / "chosen.log"
    flags = ("--set", "server.drain_s=300", "--set", f"log.file={chosen}")
    result = quire("service", "install", "--", "demo", *flags)
    assert f"the log is {chosen}" in result.stdout
    assert f"TimeoutStopSec={300 + STOP_GRACE_S}\n" in linux.read_text()
    assert exec_start(linux).count("log.file=") == 1


def test_files_are_named_from_the_root_and_what_a_download_needs_is_kept(
    quire: Run, linux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "my.toml").write_text("[server]\ndrain_s = 100\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/big disk/hub")
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", "a-key-of-sixteen-characters")
    for config in (("--config", "my.toml"), ("--config=my.toml",)):
        assert quire("service", "install", "--", "models/mine", *config).exit_code == 0
        assert f'"serve" "{tmp_path}/models/mine" "--config' in exec_start(linux)
        assert f'{tmp_path}/my.toml"' in exec_start(linux)
        assert f"TimeoutStopSec={100 + STOP_GRACE_S}\n" in linux.read_text()
    assert 'Environment="HF_HOME=/big disk/hub"\n' in linux.read_text()
    assert "a-key" not in linux.read_text()


def test_arguments_that_serve_refuses_are_refused_and_nothing_is_written(
    quire: Run, linux: Path
) -> None:
    assert quire("service", "install", "--", "demo", "--prot", "1").exit_code == 2
    wrong = quire("service", "install", "--", "demo", "--set", "server.prot=1")
    assert "server.prot: there is no such setting" in one_sentence(wrong, SETTINGS)
    assert not linux.exists()


def test_a_heads_unit_begins_the_cluster_and_serves_on_it(quire: Run, linux: Path) -> None:
    asked = ("demo", "--replicas", "1-3", "--address", "10.0.0.1", "--port", "8123")
    result = quire("service", "install", "--cluster", "--", *asked)
    assert result.exit_code == 0, result.output
    words = '"demo" "--replicas" "1-3" "--address" "10.0.0.1" "--port" "8123"'
    assert exec_start(linux) == (
        f'ExecStart="{quire_command()}" "cluster" "serve" "--start" {words}'
    )
    assert f"TimeoutStopSec={20 + CLUSTER_STOP_GRACE_S}\n" in linux.read_text()
    assert "serves on http://127.0.0.1:8123" in result.stdout
    assert quire("service", "install", "--cluster", "--", "demo", "--prot", "1").exit_code == 2


def test_a_members_unit_joins_with_a_key_that_is_kept_and_not_told(
    quire: Run, linux: Path, tmp_path: Path
) -> None:
    missing = quire("service", "install", "--join", "10.0.0.1:26379")
    assert missing.exit_code == 1, "nobody has told the key"
    assert not linux.exists()
    key = ensure_key(tmp_path / "key")
    asked = ("--join", "10.0.0.1:26379", "--key-file", str(tmp_path / "key"))
    assert quire("service", "install", *asked).exit_code == 0
    kept = cluster_folder().key
    assert kept.read_text() == key
    assert exec_start(linux).endswith(
        f'"cluster" "join" "10.0.0.1:26379" "--stay" "--key-file" "{kept}"'
    )
    assert key not in linux.read_text()
    assert quire("service", "install", "--join", "10.0.0.1:26379").exit_code == 0


def test_a_unit_is_asked_for_and_removed(quire: Run, linux: Path, tools: Tool, said: Path) -> None:
    assert quire("service", "status").stdout == "not installed\n"
    assert "there is no service to remove" in one_sentence(quire("service", "remove"), SETTINGS)
    quire("service", "install", "--", "demo")
    tools("systemctl", "echo ActiveState=active; echo SubState=running; echo NRestarts=2")  # type: ignore[call-arg]
    assert quire("service", "status").stdout == (
        f"{linux}: active (running); started again 2 times\n"
    )
    assert quire("service", "remove").stdout == f"{linux}: removed\n"
    assert not linux.exists()
    assert f"systemctl --user disable --now {UNIT}\n" in said.read_text()


def test_where_no_systemd_runs_one_sentence_says_so(
    quire: Run, linux: Path, tools: Callable[..., None]
) -> None:
    tools("systemctl", "echo 'Failed to connect to bus' >&2; exit 1")
    said = one_sentence(quire("service", "install", "--", "demo"), SETTINGS)
    assert "systemd does not run for this user here (Failed to connect to bus)" in said
    assert not linux.exists()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_where_there_is_no_tool_one_sentence_says_so(
    platform: str, quire: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("PATH", str(home))
    said = one_sentence(quire("service", "install", "--", "demo"), SETTINGS)
    assert "ctl is not to be had here" in said


def test_what_a_tool_refuses_is_said(quire: Run, linux: Path, tools: Callable[..., None]) -> None:
    tools("systemctl", 'test "$2" != enable || { echo "is masked" >&2; exit 1; }')
    said = one_sentence(quire("service", "install", "--", "demo"), SETTINGS)
    assert f"systemctl --user enable {UNIT}: is masked" in said
    tools("systemctl", 'test "$2" != enable || exit 3')
    said = one_sentence(quire("service", "install", "--", "demo"), SETTINGS)
    assert "it ended with 3" in said


# --- launchd ----------------------------------------------------------------------------------


def test_an_agent_is_installed_twice_asked_for_and_removed(
    quire: Run, mac: Path, said: Path, home: Path
) -> None:
    domain = f"gui/{os.getuid()}"
    assert quire("service", "status").stdout == "not installed\n"
    for port in ("8123", "8124"):
        result = quire("service", "install", "--", "demo", "--port", port)
        assert result.exit_code == 0, result.output
        assert f"http://127.0.0.1:{port}" in result.stdout
    read = plistlib.loads(mac.read_bytes())
    assert read["ProgramArguments"][1:5] == ["serve", "demo", "--port", "8124"]
    folder = home / "Library/Application Support/quire/log"
    assert read["ProgramArguments"][-1] == f"log.file={folder}/quire.log"
    assert folder.is_dir(), "launchd opens a file in it"
    assert mac.stat().st_mode & 0o777 == 0o600
    assert f"launchctl bootstrap {domain} {mac}\n" in said.read_text()
    assert said.read_text().count(f"launchctl bootout {domain}/{LABEL}\n") == 1
    assert quire("service", "status").stdout == f"{mac}: running; its last exit code: 0\n"
    assert quire("service", "remove").stdout == f"{mac}: removed\n"
    assert not mac.exists()
    assert "there is no service to remove" in one_sentence(quire("service", "remove"), SETTINGS)


def test_an_agent_that_is_not_loaded_is_told_as_such(quire: Run, mac: Path, home: Path) -> None:
    quire("service", "install", "--", "demo")
    (home / "loaded").unlink()
    assert quire("service", "status").stdout == f"{mac}: not loaded\n"


def test_an_agent_that_ends_slowly_is_waited_for_but_not_for_ever(
    quire: Run, mac: Path, home: Path, tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("service", "install", "--", "demo")
    slow = LAUNCHCTL.replace('rm "$loaded"', '(sleep 0.2; rm "$loaded") >&- 2>&- & exit 36')
    tools("launchctl", slow)
    assert quire("service", "install", "--", "demo").exit_code == 0
    tools("launchctl", LAUNCHCTL.replace('rm "$loaded"', "exit 0"))
    monkeypatch.setattr(service, "STOP_GRACE_S", 0)
    still = quire("service", "install", "--", "demo", "--set", "server.drain_s=0")
    assert f"{LABEL} has not ended in 0 s" in one_sentence(still, SETTINGS)
    tools("launchctl", LAUNCHCTL.replace('rm "$loaded"', "echo 'not permitted' >&2; exit 1"))
    refused = one_sentence(quire("service", "remove"), SETTINGS)
    assert f"launchctl bootout gui/{os.getuid()}/{LABEL}: not permitted" in refused


# --- where things are -------------------------------------------------------------------------


def test_without_a_home_there_is_no_service(
    quire: Run, linux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(service, "config_folder", homeless)
    assert "for a service: no home" in one_sentence(quire("service", "status"), SETTINGS)
    monkeypatch.setattr(service, "state_folder", homeless)
    result = quire("service", "install", "--", "demo")
    assert "for a service's log: no home" in one_sentence(result, SETTINGS)


def test_a_folder_that_cannot_be_written_is_said(quire: Run, linux: Path, home: Path) -> None:
    (home / ".config").touch()
    said = one_sentence(quire("service", "install", "--", "demo"), SETTINGS)
    assert f"{linux}: Not a directory" in said


def test_the_command_that_runs_is_the_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, python = tmp_path / "quire", tmp_path / "tool" / "python"
    link.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["./quire"])
    assert quire_command() == link, "a link stays what it is: upgrades move what it leads to"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingError, match="the quire command is not found"):
        quire_command()
    link.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quire_command() == link
