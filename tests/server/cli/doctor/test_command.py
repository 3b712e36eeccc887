import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.doctor.examine import Wishes
from engine.doctor.report import DoctorReport
from server.cli.doctor import text as doctor
from server.cli.doctor.text import examine_machine
from server.config import Config, SettingError, engine_config
from tests.engine.doctor.reports import MAC
from tests.metal_ext.programs import output_of


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Wishes]:
    """What a doctor who finds a Mac was asked."""
    seen: list[Wishes] = []

    def examine(wishes: Wishes, told: Callable[[str], None]) -> DoctorReport:
        told("everything")
        seen.append(wishes)
        return MAC

    monkeypatch.setattr(doctor, "examine", examine)
    return seen


def test_the_settings_say_what_is_examined(asked: list[Wishes], tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(
        "[cache]\npage_size = '16KiB'\nheadroom = '1MiB'\nsubstrate = 'posix'\n"
        "map_while_running = false\n"
    )
    told: list[str] = []
    text, serves = examine_machine(
        file, {"cache": {"substrate": "paged"}}, told.append, release_test=True
    )
    (wishes,) = asked
    assert (wishes.release_test, wishes.stress, wishes.forget_faults) == (True, False, False)
    config = wishes.config
    assert (config.substrate, config.page_bytes, config.headroom_bytes) == ("paged", 16384, 1 << 20)
    assert config.map_while_running is False
    assert told == ["everything"]
    assert text.endswith("sparse on Metal can serve.")
    assert serves


def test_json_is_one_object(asked: list[Wishes]) -> None:
    text, serves = examine_machine(None, {}, lambda _: None, as_json=True)
    assert json.loads(text) == json.loads(json.dumps(MAC.as_json()))
    assert serves
    assert asked == [Wishes(engine_config(Config()))]


def test_a_wrong_setting_is_named(asked: list[Wishes]) -> None:
    with pytest.raises(SettingError, match=r"setting cache\.substrate: "):
        examine_machine(None, {"cache": {"substrate": "papyrus"}}, lambda _: None)
    assert asked == []


def test_the_doctor_loads_neither_mlx_nor_the_extension() -> None:
    assert (
        output_of("""
        import sys
        import server.cli.commands, server.cli.doctor.text
        print({"mlx.core", "metal_ext"} & set(sys.modules))
    """)
        == "set()"
    )
