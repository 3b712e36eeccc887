from pathlib import Path

import pytest

from tests.bench.programs import Command, LlamaServer, mlx_lm_server, quire


def test_only_who_is_compared_by_it_has_to_prove_its_products() -> None:
    assert mlx_lm_server(Path("model"), 4).proves_products
    assert not quire(Path("model"), 1).proves_products
    assert quire(Path("model"), 1, "dense").label == "quire dense"


def test_a_program_is_told_more_under_another_name() -> None:
    plain = quire(Path("model"), 1)
    told = plain.told("quire, otherwise", "--set", "engine.x=1")
    assert told.label == "quire, otherwise"
    assert told.arguments == (*plain.arguments, "--set", "engine.x=1")
    assert told.has_our_model


def test_a_llama_server_has_room_for_every_slot_and_the_kernels_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = LlamaServer(Path("/b/bf16/bin"), Path("/b/avx2/bin"), Path("/m.gguf"), 8, 4096)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert built.variables == {"LD_LIBRARY_PATH": "/b/avx2/bin"}
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    assert built.variables == {"LD_LIBRARY_PATH": "/b/avx2/bin:/other"}
    program, *arguments = built.command(99, 3)
    assert program == "/b/bf16/bin/llama-server"
    said = " ".join(arguments)
    for words in ("-m /m.gguf", "--port 99", "-t 3 -tb 3", "-np 8", "-c 32768", "--cache-ram 0"):
        assert words in said


def test_whose_model_a_command_serves_is_not_known() -> None:
    assert not Command("other", "server {port}").has_our_model
    assert Command("other", "server {port}").variables == {}
