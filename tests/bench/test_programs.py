import sys
from pathlib import Path

import pytest

from tests.bench.programs import Command, mlx_lm_server, named, quire


def test_our_programs_start_through_the_launcher_on_the_loopback_interface() -> None:
    command = quire(Path("model"), 3).command(81, 3)
    assert command[:5] == [sys.executable, "-m", "tests.bench.launch", "quire", "3"]
    assert command[5:7] == ["serve", "model"]
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "81"]


def test_only_who_is_compared_by_it_has_to_prove_its_products() -> None:
    assert mlx_lm_server(Path("model"), 4).proves_products
    assert not quire(Path("model"), 1).proves_products
    assert quire(Path("model"), 1, "dense").label == "quire dense"


def test_a_command_gets_its_port_and_its_threads() -> None:
    command = Command.parse("llama=/opt/llama server -m 'a b' --port={port} -t {threads}")
    assert command.label == "llama"
    assert command.command(81, 2) == ["/opt/llama", "server", "-m", "a b", "--port=81", "-t", "2"]


@pytest.mark.parametrize("text", ["", "llama", "=run {port}", "llama="])
def test_what_has_no_name_or_no_rest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not NAME=\.\.\."):
        named(text)
    with pytest.raises(ValueError, match=r"is not NAME=\.\.\."):
        Command.parse(text)


def test_a_command_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the command has no \{port\}"):
        Command.parse("llama=run it")
