import asyncio
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx2
import pytest

from engine.build import EnginePlan
from engine.machine import PressureLevel, memory_pressure
from engine.models.checkpoint import read_checkpoint
from kvcache.backends.backend import BackendFailedError
from kvcache.backends.choice import KVBackend, KVBackendChoice
from server.cli import serve
from server.cli.model_files import ModelError, make_plan
from server.cli.serve import (
    EngineError,
    KVBackendFailedError,
    keep_awake,
    serve_model,
    start_engine,
)
from server.cli.settings import read_settings
from server.config import Config, ServerSection
from server.http import server
from server.http.listener import reserve, reserved_for_ollama
from server.http.server import listen
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.engine.test_power import Machine
from tests.models import write_model
from tests.server.commands import SMALL
from tests.server.harness import (
    COMPLETIONS,
    DEADLINE_S,
    eventually,
    make_service,
    prompt,
    token_id,
)
from tests.server.harness import start_engine as start_recall_engine


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> EnginePlan:
    return make_plan(read_settings(None, SMALL), read_checkpoint(tiny_model))


# --- engine and socket -----------------------------------------------------------------------


def test_an_engine_that_cannot_be_built_says_why(plan: EnginePlan, tmp_path: Path) -> None:
    checkpoint = replace(plan.checkpoint, path=tmp_path)
    with pytest.raises(EngineError, match=r"the engine did not start: "):
        start_engine(read_settings(None, SMALL), replace(plan, checkpoint=checkpoint))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where ``listen`` will listen, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with reserve("127.0.0.1", 0) as reserved:
        reserved.listen()  # clients of these tests may come early
        yield reserved
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def port(listener: socket.socket) -> int:
    number: int = listener.getsockname()[1]
    return number


def status_of(port: int, text: str) -> int:
    """What a completion of the text is answered with."""
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
        return http.post(COMPLETIONS, json=prompt(text, max_tokens=2)).status_code


def test_fault_08_a_server_whose_engine_has_failed_ends(
    tokenizer: Tokenizer, listener: socket.socket, port: int
) -> None:
    engine = start_recall_engine(failing=token_id(tokenizer, "#"))
    service = make_service(engine.client, tokenizer)
    with ThreadPoolExecutor(1) as clients:
        # A second failed step within a minute is the engine's own fault.
        answers = clients.map(lambda text: status_of(port, text), ["abc", "ab#", "ab#"])
        told: list[str] = []
        listen(Config(), service, listener, lambda _, url: told.append(url))
        assert told == [f"http://127.0.0.1:{port}"]
        assert list(answers) == [200, 500, 500]
    assert not engine.client.alive


def test_fault_21_answers_that_take_longer_than_the_drain_are_cut_off(
    tokenizer: Tokenizer, listener: socket.socket, port: int
) -> None:
    engine = start_recall_engine()
    engine.gate.closed = True
    service = make_service(engine.client, tokenizer)

    def end_when_it_waits() -> None:
        asyncio.run(eventually(lambda: engine.client.in_flight == 1))
        signal.raise_signal(signal.SIGTERM)

    with ThreadPoolExecutor(2) as clients:
        waiting = clients.submit(status_of, port, "abc")
        clients.submit(end_when_it_waits)
        listen(Config(server=ServerSection(drain_s=0)), service, listener)
        assert waiting.result() == 503
    engine.stop()
    assert engine.client.stats.running == 0


def test_a_second_port_serves_the_same(
    tokenizer: Tokenizer, listener: socket.socket, port: int
) -> None:
    engine = start_recall_engine()
    service = make_service(engine.client, tokenizer)
    settings = Config(server=ServerSection(ollama_port=0))

    def ask(second: int) -> list[str]:
        asyncio.run(eventually(lambda: is_there(second)))
        with httpx2.Client(timeout=DEADLINE_S) as http:
            answers = [http.get(f"http://localhost:{at}/api/tags").text for at in (port, second)]
        signal.raise_signal(signal.SIGTERM)
        return answers

    with reserved_for_ollama(settings.server) as (other,), ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, other.getsockname()[1])
        listen(settings, service, listener, others=[other])
        first, second = asked.result()
    assert first == second
    assert '"models":[{"name":"recall"' in first
    engine.stop()


def is_there(port: int) -> bool:
    """Whether somebody listens."""
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
        return True
    return False


# --- all of it, but for the socket ------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, own_log: None) -> Iterator[list[Service]]:
    """Whatever would have been served, instead of serving it."""
    found: list[Service] = []
    monkeypatch.setattr(serve, "listen", lambda _, service, *__: found.append(service))
    yield found
    assert all(not service.client.alive for service in found), "the engine has been stopped"


def test_everything_is_put_together(
    tiny_model: Path, served: list[Service], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SMALL | {"server": {"port": 0, "served_model_name": "alias"}, "log": {"level": "debug"}}
    serve_model(str(tiny_model), read_settings(None, flags))
    (service,) = served
    assert service.model.names == ("alias", "tiny", str(tiny_model))
    assert service.model.facts.family == "qwen3"
    assert 0 < service.model.facts.weights_bytes < service.model.facts.fixed_bytes
    ends = set(service.tokenizer.end_ids)
    assert ends < service.model.stop_token_ids
    assert "KV backend: posix" in capsys.readouterr().err


@pytest.mark.parametrize("vllm_names", [False, True])
def test_metrics_name_what_is_served(
    vllm_names: bool, tiny_model: Path, served: list[Service]
) -> None:
    serve_model(
        str(tiny_model), read_settings(None, SMALL | {"metrics": {"vllm_names": vllm_names}})
    )
    (service,) = served
    text = service.metrics.render().decode()
    assert 'arithmetic="packed",kv_backend="posix",model="tiny"' in text
    assert ('vllm:num_requests_running{engine="0",model_name="tiny"}' in text) == vllm_names
    (footprint,) = re.findall(r"^quire_process_footprint_bytes (\S+)$", text, re.MULTILINE)
    assert float(footprint) > 1024**2


def test_the_tokenizer_says_what_ends_an_answer_where_the_model_does_not(
    tmp_path: Path, served: list[Service]
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    serve_model(str(folder), read_settings(None, SMALL))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    serve_model(str(folder), read_settings(None, SMALL))
    first, second = served
    assert first.model.stop_token_ids == set(first.tokenizer.end_ids)
    assert second.model.stop_token_ids == set()


@pytest.mark.parametrize(("heeds", "source"), [(True, memory_pressure), (False, None)])
def test_the_engine_is_looked_at_while_it_serves(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_log: None,
    heeds: bool,
    source: Callable[[], PressureLevel] | None,
) -> None:
    told: list[object] = []

    class EngineMonitor:
        def __init__(self, client: object, *, exit_code: Callable[[], int], **how: object) -> None:
            told.append(how | {"exit_code": exit_code()})

        def start(self) -> None:
            told.append("start")

        def stop(self) -> None:
            told.append("stop")

    monkeypatch.setattr(serve, "EngineMonitor", EngineMonitor)

    def stop(_: float) -> bool:
        told.append("engine")
        return True

    idle = SimpleNamespace(alive=True, kv_backend_failed=False, stop=stop)
    monkeypatch.setattr(serve, "start_engine", lambda *_: idle)
    monkeypatch.setattr(serve, "listen", lambda *_: told.append("listen"))
    flags = SMALL | {"engine": SMALL["engine"] | {"watchdog_s": 7.0}}
    flags["cache"] = SMALL["cache"] | {"heed_pressure": heeds}
    serve_model(str(tiny_model), read_settings(None, flags))
    # To the very end: what would hang there must end, too.
    assert told.pop(0) == {"watchdog_s": 7.0, "pressure": source, "awake": None, "exit_code": 1}
    assert told == ["start", "listen", "engine", "stop"]


@pytest.mark.parametrize(("host", "held"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_a_mac_on_mains_is_kept_awake_for_other_machines(
    host: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    power = Machine()
    power.mains = True
    monkeypatch.setattr(serve, "power_of", lambda: power)
    awake = keep_awake(Config(server=ServerSection(host=host)))
    assert awake is not None
    awake.update(busy=False)
    assert len(power.held) == held
    assert keep_awake(Config(server=ServerSection(host=host, keep_awake=False))) is None


@pytest.mark.parametrize("saves", [False, True])
def test_a_low_power_mode_is_said_once(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "power_of", lambda: Machine(low=saves))
    said: list[str] = []
    monkeypatch.setattr(serve, "log", SimpleNamespace(warning=said.append))
    keep_awake(Config())
    assert ["low power mode" in line for line in said] == [True] * saves


def test_an_engine_that_fails_while_it_serves_is_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, own_log: None
) -> None:
    stopped: list[float] = []
    dead = SimpleNamespace(
        alive=False, busy_since=None, kv_backend_failed=False, failure="why", stop=stopped.append
    )
    monkeypatch.setattr(serve, "start_engine", lambda *_: dead)
    monkeypatch.setattr(serve, "listen", lambda *_: None)
    with pytest.raises(EngineError, match=r"why \(see the log\)"):
        serve_model(str(tiny_model), read_settings(None, SMALL))
    assert stopped == [serve.STOP_TIMEOUT_S]


def test_a_gpu_whose_memory_of_k_and_v_fails_is_told_with_what_comes_next(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise BackendFailedError("the first mapping took over 20 s")

    monkeypatch.setattr(serve, "build_engine", fail)
    settings = read_settings(None, SMALL)
    sparse = replace(plan, kv_backend=KVBackendChoice(KVBackend.SPARSE, ()))
    with pytest.raises(KVBackendFailedError, match=r"took over 20 s; .* else serves.* --stress`"):
        start_engine(settings, sparse)
    with pytest.raises(EngineError, match=r"took over 20 s$") as of_a_cpu:
        start_engine(settings, plan)
    assert not isinstance(of_a_cpu.value, KVBackendFailedError)


def test_fault_16_no_port_is_left_open_by_a_model_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_log: None
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    reserved = reserve("127.0.0.1", 0)
    monkeypatch.setattr(serve, "reserve", lambda *_: reserved)
    monkeypatch.setattr(server, "listen_on", never)
    monkeypatch.setattr(serve, "build_engine", never)
    with pytest.raises(ModelError, match=str(folder)):
        serve_model(str(folder), read_settings(None, SMALL))
    assert reserved.fileno() == -1, "it has been closed"


def test_an_engine_that_does_not_end_in_time_is_told_of(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = SimpleNamespace(alive=True, busy_since=None, stop=lambda _: False)
    monkeypatch.setattr(serve, "start_engine", lambda *_: stuck)
    monkeypatch.setattr(serve, "listen", lambda *_: None)
    serve_model(str(tiny_model), read_settings(None, SMALL))
    assert "did not end in time: its memory is left to the system" in capsys.readouterr().err
