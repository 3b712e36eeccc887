import asyncio
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx2
import pytest

from engine.build import EnginePlan
from engine.checkpoint import Checkpoint, read_checkpoint
from engine.pressure import PressureSource, pressure_source
from engine.weights import Arithmetic
from kvcache.backend import BackendFailedError
from kvcache.choice import SubstrateChoice
from kvcache.substrates import Substrate
from server import assembly, drained_server
from server.assembly import (
    check_vocabulary,
    engine_config,
    make_plan,
    read_model,
    serve_model,
    start_engine,
)
from server.config import MIB, Config, ServerSection, Tables
from server.drained_server import listen
from server.listener import reserve
from server.log import configure_log
from server.plan.command import PlanOptions, plan_model
from server.service import Service
from server.settings import read_settings
from server.startup_errors import EngineError, ModelError, SettingError, SubstrateFailedError
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tests.kvcache.metal_double import Device
from tests.models import TEMPLATE, TINY, write_embedding_model, write_model, write_tokenizer
from tests.server.harness import (
    COMPLETIONS,
    DEADLINE_S,
    eventually,
    make_service,
    prompt,
    token_id,
)
from tests.server.harness import start_engine as start_recall_engine

GIB = 1024 * MIB
SMALL: Tables = {
    "server": {"port": 0},
    "engine": {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64},
    "cache": {"kv_budget": 8 * MIB, "heap_size": MIB, "free_slack": MIB, "page_size": 4096},
}


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> EnginePlan:
    return make_plan(read_settings(None, SMALL), read_checkpoint(tiny_model))


# --- the engine's settings ----------------------------------------------------------------------


def test_every_setting_of_engine_and_cache_reaches_the_engine() -> None:
    numbers = {name: 1000 + i for i, name in enumerate(("max_num_seqs", "max_model_len"))}
    settings = read_settings(
        None,
        {
            "engine": numbers | {"arithmetic": "stored", "check_every_step": True, "threads": 3},
            "cache": {"dtype": "bfloat16", "kv_budget": "1GiB", "substrate": "dense"},
        },
    )
    config = engine_config(settings)
    assert (config.max_num_seqs, config.max_model_len) == (1000, 1001)
    assert (config.arithmetic, config.kv_dtype) == (Arithmetic.STORED, "bfloat16")
    assert (config.kv_budget_bytes, config.substrate) == (1024 * MIB, "dense")
    assert (config.check_every_step, config.threads) == (True, 3)
    chosen_later = engine_config(Config())
    assert chosen_later.arithmetic is None
    assert chosen_later.kv_dtype is None


# --- plan ------------------------------------------------------------------------------------


def test_an_engine_that_does_not_end_in_time_is_told_of(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = SimpleNamespace(alive=True, stop=lambda _: False)
    monkeypatch.setattr(assembly, "start_engine", lambda *_: stuck)
    monkeypatch.setattr(assembly, "listen", lambda *_: None)
    serve_model(str(tiny_model), None, SMALL)
    assert "did not end in time: its memory is left to the system" in capsys.readouterr().err


def test_a_budget_that_does_not_fit_says_which_figure(tiny_model: Path) -> None:
    settings = read_settings(None, {"cache": {"kv_budget": "900000GiB"}})
    with pytest.raises(SettingError, match=r"900000\.00 GiB does not fit: .*--kv-budget"):
        make_plan(settings, read_checkpoint(tiny_model))


def test_a_page_that_cannot_be_mapped_is_refused(tiny_model: Path) -> None:
    settings = read_settings(None, {"cache": {"page_size": 5000}})
    with pytest.raises(SettingError, match=r"page"):
        make_plan(settings, read_checkpoint(tiny_model))


def test_threat_21_a_mac_in_use_serves_with_a_warning_and_plan_says_what_serve_says(
    tmp_path: Path,
    small_mac: Device,
    own_log: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_model(tmp_path / "model", replace(TINY, head_dim=64))
    settings = read_settings(None, {})
    configure_log(settings.log)
    memory = read_model(str(folder), settings).plan.memory
    logged = capsys.readouterr().err.splitlines()
    assert memory.demand.usable_bytes == 8 * GIB * 2 // 3 - 1536 * MIB
    assert any("working set of the GPU" in line and "5.33 GiB" in line for line in logged)
    assert memory.warning is not None
    (warning,) = (line for line in logged if "[warning" in line)
    assert memory.warning in warning
    assert "128.00 MiB are available now" in warning
    planned = plan_model(str(folder), None, PlanOptions(device="M2", context=2048))
    said = "\n".join(line.partition("] ")[2].strip() for line in logged)
    for line in planned.split("\n\n")[0].splitlines():
        assert line.strip() in said


def test_threat_21_a_mac_that_is_too_small_is_told_which_figure_does_not_fit(
    tmp_path: Path, small_mac: Device
) -> None:
    folder = write_model(tmp_path / "model", replace(TINY, head_dim=64))
    small_mac.said["recommended_working_set_bytes"] = 1900 * MIB
    with pytest.raises(SettingError, match=r"nothing is left for .* of 364.00 MiB usable.*--kv-b"):
        make_plan(read_settings(None, {}), read_checkpoint(folder))
    settings = read_settings(None, {"cache": {"kv_budget": "64MiB"}})
    assert make_plan(settings, read_checkpoint(folder)).memory.kv_budget_bytes <= 64 * MIB


# --- the model's files -----------------------------------------------------------------------


def test_a_tokenizer_with_more_tokens_than_the_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, TINY.vocab_size + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json: it has 1025 tokens.* is 1024"):
        check_vocabulary(folder, Tokenizer(folder), read_checkpoint(folder))
    write_tokenizer(folder, TINY.vocab_size)
    check_vocabulary(folder, Tokenizer(folder), read_checkpoint(folder))


@pytest.mark.parametrize(("task", "embeds"), [("auto", True), ("generate", False), ("embed", True)])
def test_a_setting_says_what_a_model_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, embeds: bool
) -> None:
    found: list[bool] = []

    def plan(_: object, checkpoint: Checkpoint) -> None:
        found.append(checkpoint.embeds)
        raise SettingError("seen")

    monkeypatch.setattr(assembly, "make_plan", plan)
    folder = write_embedding_model(tmp_path / "model")
    with pytest.raises(SettingError, match="seen"):
        serve_model(str(folder), None, SMALL | {"engine": {"task": task}})
    assert found == [embeds]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the model has no chat template: chats, messages and responses are refused"),
        ("x\n{% if %}", "has failed with a plain conversation (TemplateSyntaxError in line 2: "),
        ("{{ raise_exception('no') }}", "plain conversation (TemplateError in line 1: no): what"),
        (TEMPLATE, ""),
    ],
)
def test_a_template_is_tried_at_start_and_what_is_wrong_with_it_is_said(
    template: str | None,
    said: str,
    tmp_path: Path,
    own_log: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, TINY.vocab_size, template=template)
    settings = read_settings(None, SMALL)
    configure_log(settings.log)
    read_model(str(folder), settings)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "[warning" in line]
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)
    assert all("completions are not" in line for line in warnings)


def test_the_template_of_a_model_that_makes_vectors_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ChatTemplate, "try_out")
    read_model(str(write_embedding_model(tmp_path)), read_settings(None, SMALL))


# --- engine and socket -----------------------------------------------------------------------


def test_an_engine_starts_from_its_plan_and_is_warm(plan: EnginePlan) -> None:
    client = start_engine(read_settings(None, SMALL), plan)
    try:
        assert client.alive
        assert client.limits.max_model_len == 256
        assert client.limits.vocab_size == TINY.vocab_size
    finally:
        assert client.stop(20)


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
        listen(Config(), service, listener)
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


# --- all of it, but for the socket ------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, own_log: None) -> Iterator[list[Service]]:
    """Whatever would have been served, instead of serving it."""
    found: list[Service] = []
    monkeypatch.setattr(assembly, "listen", lambda _, service, __: found.append(service))
    yield found
    assert all(not service.client.alive for service in found), "the engine has been stopped"


def test_everything_is_put_together(
    tiny_model: Path, served: list[Service], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SMALL | {"server": {"port": 0, "served_model_name": "alias"}, "log": {"level": "info"}}
    serve_model(str(tiny_model), None, flags)
    (service,) = served
    assert service.model.names == ("alias", "tiny", str(tiny_model))
    ends = set(service.tokenizer.end_ids)
    assert ends < service.model.stop_token_ids
    assert "substrate: posix" in capsys.readouterr().err


@pytest.mark.parametrize("vllm_names", [False, True])
def test_metrics_name_what_is_served(
    vllm_names: bool, tiny_model: Path, served: list[Service]
) -> None:
    serve_model(str(tiny_model), None, SMALL | {"metrics": {"vllm_names": vllm_names}})
    (service,) = served
    text = service.metrics.render().decode()
    assert 'arithmetic="packed",model="tiny",substrate="posix"' in text
    assert ('vllm:num_requests_running{engine="0",model_name="tiny"}' in text) == vllm_names
    (footprint,) = re.findall(r"^quire_process_footprint_bytes (\S+)$", text, re.MULTILINE)
    assert float(footprint) > 1024**2


def test_the_tokenizer_says_what_ends_an_answer_where_the_model_does_not(
    tmp_path: Path, served: list[Service]
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    serve_model(str(folder), None, SMALL)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    serve_model(str(folder), None, SMALL)
    first, second = served
    assert first.model.stop_token_ids == set(first.tokenizer.end_ids)
    assert second.model.stop_token_ids == set()


@pytest.mark.parametrize(("heeds", "source"), [(True, pressure_source()), (False, None)])
def test_the_engine_is_looked_at_while_it_serves(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_log: None,
    heeds: bool,
    source: PressureSource | None,
) -> None:
    told: list[object] = []

    class EngineMonitor:
        def __init__(self, client: object, *, exit_code: Callable[[], int], **how: object) -> None:
            told.append(how | {"exit_code": exit_code()})

        def start(self) -> None:
            told.append("start")

        def stop(self) -> None:
            told.append("stop")

    monkeypatch.setattr(assembly, "EngineMonitor", EngineMonitor)

    def stop(_: float) -> bool:
        told.append("engine")
        return True

    idle = SimpleNamespace(alive=True, substrate_failed=False, stop=stop)
    monkeypatch.setattr(assembly, "start_engine", lambda *_: idle)
    monkeypatch.setattr(assembly, "listen", lambda *_: told.append("listen"))
    flags = SMALL | {"engine": SMALL["engine"] | {"watchdog_s": 7.0}}
    flags["cache"] = SMALL["cache"] | {"heed_pressure": heeds}
    serve_model(str(tiny_model), None, flags)
    # To the very end: what would hang there must end, too.
    assert told.pop(0) == {"watchdog_s": 7.0, "pressure": source, "exit_code": 1}
    assert told == ["start", "listen", "engine", "stop"]


def test_an_engine_that_fails_while_it_serves_is_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, own_log: None
) -> None:
    stopped: list[float] = []
    dead = SimpleNamespace(alive=False, substrate_failed=False, stop=stopped.append)
    monkeypatch.setattr(assembly, "start_engine", lambda *_: dead)
    monkeypatch.setattr(assembly, "listen", lambda *_: None)
    with pytest.raises(EngineError, match="the engine has failed"):
        serve_model(str(tiny_model), None, SMALL)
    assert stopped == [assembly.STOP_TIMEOUT_S]


def test_a_gpu_whose_memory_of_k_and_v_fails_is_told_with_what_comes_next(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise BackendFailedError("the first mapping took over 20 s")

    monkeypatch.setattr(assembly, "build_engine", fail)
    settings = read_settings(None, SMALL)
    sparse = replace(plan, substrate=SubstrateChoice(Substrate.SPARSE, ()))
    with pytest.raises(SubstrateFailedError, match=r"took over 20 s; .* something else serves"):
        start_engine(settings, sparse)
    with pytest.raises(EngineError, match=r"took over 20 s$") as of_a_cpu:
        start_engine(settings, plan)
    assert not isinstance(of_a_cpu.value, SubstrateFailedError)


def test_fault_16_no_port_is_left_open_by_a_model_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_log: None
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    reserved = reserve("127.0.0.1", 0)
    monkeypatch.setattr(assembly, "reserve", lambda *_: reserved)
    monkeypatch.setattr(drained_server, "listen_on", never)
    monkeypatch.setattr(assembly, "build_engine", never)
    with pytest.raises(ModelError, match=str(folder)):
        serve_model(str(folder), None, SMALL)
    assert reserved.fileno() == -1, "it has been closed"
