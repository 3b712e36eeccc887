"""Several models with processes of their own, and one such process."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest
from huggingface_hub import constants

from engine.models.checkpoint import read_checkpoint
from server.catalogue.hub import find_model
from server.catalogue.local_models import local_models
from server.cli import model_process, serve, serve_models
from server.cli.model_files import ModelError, new_reader, read_model
from server.cli.models import Machine
from server.cli.serve_models import COMMAND
from server.cli.settings import read_settings, with_further
from server.config import Config, Tables
from server.http.listener import reserve
from server.protocol.wire_errors import ApiError
from server.supervisor.app import create_front
from server.supervisor.front import Front
from server.supervisor.models import MemoryNeeds
from server.supervisor.process import LoadError, Start
from tests.draft_heads import write_companion
from tests.engine import test_power
from tests.engine.models.hybrids import write_hybrid
from tests.hostile_models import spoil
from tests.server.commands import SMALL, Run, one_sentence
from tests.server.harness import COMPLETIONS, DEADLINE_S, http_client, prompt
from tests.server.hub_server import Files, Hub

MODEL_ERROR = 3
MIB = 1024**2
KEY = "a-key-of-sixteen-characters"


@pytest.fixture(autouse=True)
def nothing_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))


@pytest.fixture(autouse=True)
def own_signals(own_log: None) -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def three(tiny_model: Path, tmp_path: Path) -> Path:
    """A folder with three models, one of an organisation, and one that is broken."""
    for name in ("first", "second", "org/third", "broken"):
        shutil.copytree(tiny_model, tmp_path / "models" / name)
    (tmp_path / "models/broken/config.json").write_text("{", encoding="utf-8")
    return tmp_path / "models"


def settings_with(folder: Path, **models: Any) -> Tables:
    return SMALL | {"models": {"folders": str(folder), **models}}


def on_disk(settings: Config, budget_bytes: int) -> serve_models.ModelOnDisk:
    """The model that is called first."""
    (first,) = serve_models.Disk(settings.models.folders, ["first"]).models()
    machine = Machine(settings, budget_bytes)
    return serve_models.ModelOnDisk(first, machine, Start((), Path(), 1.0), int)


def front_of(flags: Tables) -> Front:
    """What clients see of all models, whose processes are not started."""
    return serve_models.make_front(read_settings(None, flags), (), Start((), Path(), 1.0))


# --- all of it -------------------------------------------------------------------------------


def test_models_of_a_folder_are_served_by_processes_that_end_with_the_server(
    three: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, port = psutil.Process().children(), Future[int]()

    def reserved(host: str, _: int) -> socket.socket:
        listener = reserve(host, 0)
        port.set_result(listener.getsockname()[1])
        return listener

    def use() -> list[Any]:
        try:
            found: list[Any] = []
            url = f"http://127.0.0.1:{port.result(DEADLINE_S)}"
            with httpx2.Client(base_url=url, timeout=DEADLINE_S) as client:
                while not found:
                    try:
                        found.append(client.get("/v1/models").json())
                    except httpx2.ConnectError:
                        time.sleep(0.01)
                for model in ("first", "third"):
                    asked = prompt("abc", max_tokens=2, model=model)
                    found.append(client.post(COMPLETIONS, json=asked).json())
            return found
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(serve_models, "reserve", reserved)
    monkeypatch.setattr(serve, "neighbours", lambda: "somebody is called so, too")
    with ThreadPoolExecutor(1) as clients:
        using = clients.submit(use)
        serve_models.serve_models((), read_settings(None, settings_with(three)))
        listed, first, third = using.result()
    assert [entry["id"] for entry in listed["data"]] == ["first", "org/third", "second"]
    assert {entry["max_model_len"] for entry in listed["data"]} == {256}
    assert (first["model"], third["model"]) == ("first", "org/third")
    assert first["choices"] == third["choices"], "they are copies"
    said = capsys.readouterr().err
    assert "somebody is called so, too" in said
    assert "serving 3 models" in said
    assert "org/third is loaded" in said
    assert not set(psutil.Process().children()) - set(before)


def test_folders_of_servers_that_were_killed_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from server.cli.serve_models import socket_folder\n"
        "with socket_folder() as folder: print(folder); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-uc", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "1.sock").touch()
        (tmp_path / "quire-front-strange").mkdir()
        with serve_models.socket_folder() as ours:
            assert {ours, theirs} <= set(tmp_path.iterdir())
        assert theirs.exists(), "its server runs"
        other.kill()
        other.wait()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with serve_models.socket_folder():
            assert theirs.exists(), "it is another user's"
        monkeypatch.undo()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with serve_models.socket_folder() as ours:
            assert set(tmp_path.iterdir()) == {ours, tmp_path / "quire-front-strange"}
        assert not ours.exists()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), ["first", "org/third", "second"]),
        (("second", "third"), ["org/third", "second"]),
        (("org/third",), ["org/third"]),
        (("demo", "first"), ["first", "quire-demo"]),
    ],
)
def test_models_may_be_named(three: Path, names: tuple[str, ...], found: list[str]) -> None:
    disk = serve_models.Disk([three], names)
    assert [model.name for model in disk.checked()] == found
    assert disk.models() == disk.checked()


def test_models_may_be_named_by_their_folders(three: Path) -> None:
    named = [str(three / "first"), str(three / "org" / "third")]
    found = serve_models.Disk([], named).checked()
    assert [model.name for model in found] == ["first", "third"]
    found = serve_models.Disk([three], named).checked()
    assert [model.name for model in found] == ["first", "org/third"], "as its own folder has it"


def test_a_folder_that_is_named_is_meant_where_another_model_is_called_so(
    three: Path, tmp_path: Path
) -> None:
    shutil.copytree(three / "first", tmp_path / "second")
    (found,) = serve_models.Disk([three], [str(tmp_path / "second")]).checked()
    assert found.folder == tmp_path / "second"
    (tmp_path / "second/config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"second: config\.json"):
        serve_models.Disk([three], [str(tmp_path / "second")]).checked()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("first", "org/nobody"), "org/nobody: it is not on this disk: `quire pull org/nobody`"),
        (("first", "nobody"), "nobody: there is no such folder, and it is not a hub id"),
        (("first", "qwen3:4b"), "qwen3:4b: it is not on this disk"),
        (("first", "broken"), "broken: "),
        (("first", "Broken"), "Broken: "),
        (("first", "Org/Spoilt"), "Org/Spoilt: config.json: the file is not readable JSON"),
    ],
)
def test_a_name_that_cannot_be_served_is_refused(
    three: Path, names: tuple[str, ...], sentence: str
) -> None:
    shutil.copytree(three / "broken", three / "org/spoilt")
    with pytest.raises(ModelError) as error:
        serve_models.Disk([three], names).checked()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("First", "FIRST"),
        ("ORG/third", "org/Third"),
        ("Third", "Org/Third"),
        ("mlx-community/TINY-4bit", "MLX-community/tiny-4bit"),
        ("tiny-4BIT", "mlx-community/TINY-4bit"),
    ],
)
async def test_a_models_name_may_be_in_any_case(
    name: str, pinned: str, three: Path, lm_studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(serve_models, "log", SimpleNamespace(info=lines.append))
    settings = read_settings(None, settings_with(three, pinned=pinned))
    front = serve_models.make_front(settings, ["second", name], Start((), Path(), 1.0))
    (model,) = [model for model in front.models.models.values() if model.pinned]
    assert model.name.lower() == pinned.lower()
    for asked in (name, name.upper(), f"{name}:latest"):
        assert await front.model_of(asked) is model
    with pytest.raises(ApiError, match=f"did you mean '{model.name}'?"):
        await front.model_of(f"{model.name.rpartition('/')[2]}s")
    line = "1 of the models lie in LM Studio's folder: quire only reads them"
    assert lines == [line] * model.name.startswith("mlx")


def test_a_disk_without_models_says_what_to_do(quire: Run, three: Path, tmp_path: Path) -> None:
    said = one_sentence(quire("serve", "--port", "0"), MODEL_ERROR)
    assert "`quire pull ORG/NAME` fetches one, and `quire serve demo` needs none" in said
    said = one_sentence(
        quire("serve", "--port", "0", "--set", f"models.folders={three / 'broken'}"), MODEL_ERROR
    )
    assert "; broken: " in said


def test_what_a_model_needs_is_what_its_process_is_given(three: Path) -> None:
    """Its context is the same whatever is loaded beside it, and one such sequence always fits."""
    settings = read_settings(None, settings_with(three, pinned="first"))
    model = on_disk(settings, 4096 * MIB)
    assert model.pinned
    needs = model.needs()
    assert needs.max_model_len == 256
    assert 0 < needs.least_kv_bytes <= needs.most_kv_bytes == 8 * MIB
    assert needs.fixed_bytes > serve_models.PROCESS_BYTES
    tables = serve_models.settings_of(settings, "first", needs)
    assert (tables["cache"]["kv_budget"], tables["engine"]["max_model_len"]) == (8 * MIB, 256)


def test_states_of_recurrent_layers_count_and_are_part_of_what_its_process_is_given(
    tmp_path: Path,
) -> None:
    write_hybrid(tmp_path / "first")
    settings = read_settings(None, settings_with(tmp_path))
    model = on_disk(settings, 4096 * MIB)
    checkpoint = model.local.checkpoint
    assert checkpoint is not None
    needs, plan = model.needs(), model.machine.plan(checkpoint).memory
    assert needs.state_bytes == plan.state_bytes > MIB
    assert (
        needs.fixed_bytes
        == plan.demand.fixed_bytes + serve_models.PROCESS_BYTES + needs.state_bytes
    )
    tables = serve_models.settings_of(settings, "first", needs)
    given = Config.model_validate(json.loads(json.dumps(tables)))
    its = replace(model, machine=Machine(given, 4096 * MIB)).machine.plan(checkpoint).memory
    assert its.max_model_len == plan.max_model_len
    assert its.state_bytes == needs.state_bytes
    assert its.kv_budget_bytes == needs.most_kv_bytes


def test_a_companion_counts_in_what_a_model_needs_as_in_its_process(tmp_path: Path) -> None:
    model = write_hybrid(tmp_path / "first")
    settings = read_settings(None, settings_with(tmp_path))
    before = on_disk(settings, 4096 * MIB).needs()
    write_companion(tmp_path / "first-MTP-4bit", model)
    needs = on_disk(settings, 4096 * MIB).needs()
    assert needs.fixed_bytes > before.fixed_bytes
    tables = json.loads(json.dumps(serve_models.settings_of(settings, "first", needs)))
    memory = read_model(str(model), Config.model_validate(tables)).plan.memory
    its = memory.demand.fixed_bytes + memory.state_bytes + serve_models.PROCESS_BYTES
    assert (its, memory.max_model_len) == (needs.fixed_bytes, needs.max_model_len)
    off = read_settings(None, with_further(settings_with(tmp_path), ["engine.drafts=off"]))
    (first,) = serve_models.Disk([tmp_path], ["first"], new_reader(off)).models()
    assert first.checkpoint == read_checkpoint(model, drafts=False)


def test_what_a_model_can_do_is_read_from_its_files(three: Path) -> None:
    model = on_disk(read_settings(None, settings_with(three)), 4096 * MIB)
    for _ in range(2):
        assert (model.facts().family, model.facts().parameters > 0) == ("qwen3", True)
        capabilities, template = model.abilities()
        assert capabilities[0] == "completion"
        assert template
    os.mkfifo(three / "first/chat_template.jinja")
    with pytest.raises(LoadError, match=r"chat_template\.jinja: this is no regular file"):
        model.abilities()


async def test_a_model_whose_tokenizer_is_broken_says_so_when_it_is_shown(three: Path) -> None:
    (three / "first/tokenizer.json").write_text("{", encoding="utf-8")
    app = create_front(front_of(settings_with(three)))
    async with http_client(app) as client:
        answer = await client.post("/api/show", json={"model": "first"})
        assert answer.status_code == 503
        assert "first was not loaded: " in answer.json()["error"]
        assert "make no tokenizer" in answer.json()["error"]
        assert (await client.post("/api/show", json={"model": "second"})).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        "a token of id 2**31",
        "10**9 layers",
        "a pipe as config.json",
        "a pipe as the weights",
        "a pipe as the template",
        "zeros as the index",
    ],
)
@pytest.mark.usefixtures("impatient_reader")
async def test_a_hostile_model_that_appears_holds_up_no_other(
    kind: str, three: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do requests for it whose clients have left."""
    monkeypatch.setattr("server.supervisor.front.RESCAN_S", 0.0)
    app = create_front(front_of(settings_with(three)))
    spoil(tiny_model, three / "hostile", kind)
    async with asyncio.timeout(DEADLINE_S), http_client(app) as client:
        for _ in range(8):
            asked = asyncio.create_task(client.post("/api/show", json={"model": "hostile"}))
            await asyncio.sleep(0.01)
            asked.cancel()
        listed = (await client.get("/v1/models")).json()["data"]
        assert {"first", "org/third", "second"} <= {model["id"] for model in listed}
        assert (await client.get("/v1/models/nobody")).status_code == 404
        assert (await client.post("/api/show", json={"model": "first"})).status_code == 200
        assert (await client.post("/api/show", json={"model": "hostile"})).status_code in (200, 404)


async def test_a_model_that_is_pulled_again_is_the_newer_one(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.supervisor.front.RESCAN_S", 0.0)

    def pull(more: bytes) -> None:
        hub.push("someone/model", tiny_files | {"generation_config.json": more})
        find_model("someone/model").fetch_weights()

    async def digest() -> str:
        (model,) = (await client.get("/api/tags")).json()["models"]
        return str(model["digest"])

    pull(b"{}")
    app = create_front(front_of(SMALL))
    async with http_client(app) as client:
        before = await digest()
        assert await digest() == before
        pull(b"{ }")
        assert await digest() != before


def test_the_disk_is_looked_at_once_before_anybody_can_ask(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []

    def look(folders: Any, *, hub: bool = True, **how: Any) -> Any:
        looked.extend([folders] * hub)
        return local_models(folders, hub=hub, **how)

    monkeypatch.setattr(serve_models, "local_models", look)
    front = front_of(settings_with(three))
    assert (len(front.models.models), looked) == (3, [(three,)])


def test_a_model_that_does_not_fit_says_which_figure(three: Path) -> None:
    settings = read_settings(None, {"models": {"folders": str(three)}})
    with pytest.raises(LoadError, match=r"[GM]iB"):
        on_disk(settings, MIB).needs()


def test_each_process_has_a_log_file_of_its_own(three: Path, tmp_path: Path) -> None:
    log = {"log": {"file": str(tmp_path / "quire.log")}}
    settings = read_settings(None, settings_with(three) | log)
    tables = serve_models.settings_of(settings, "org/first", MemoryNeeds(1, 1, 1, 2))
    read = Config.model_validate(json.loads(json.dumps(tables)))
    assert read.log.file == tmp_path / "quire.org--first.log"


def test_the_process_of_a_model_gets_the_keys(three: Path) -> None:
    settings = read_settings(None, settings_with(three) | {"access": {"api_keys": KEY}})
    tables = serve_models.settings_of(settings, "first", MemoryNeeds(1, 1, 1, 2))
    assert json.loads(json.dumps(tables))["access"]["api_keys"] == [KEY]


# --- one process -----------------------------------------------------------------------------


class Supervisor:
    """The other end of a process."""

    def __init__(self, folder: Path) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "own.sock")
        self.listener.bind(self.path)
        self.lines = self.connection.makefile("rb")

    def tell(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, what: str) -> dict[str, Any]:
        """The next message with that."""
        while what not in (message := json.loads(self.lines.readline())):
            pass
        found: dict[str, Any] = message
        return found

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path)
    yield made
    made.close()


def run_process(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the process's program here, with its sockets; return its exit code."""
    codes: list[int] = []
    numbers = [str(one.detach()) for one in (supervisor.listener, supervisor.theirs)]
    monkeypatch.setattr("sys.argv", ["model_process", *numbers])
    monkeypatch.setattr(os, "_exit", codes.append)
    model_process.main()
    return codes[0]


def test_a_process_serves_tells_and_obeys(
    tiny_model: Path,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "power_of", lambda: test_power.Machine(low=True))
    needs = MemoryNeeds(1, 1, 8 * MIB, 256)
    tables = serve_models.settings_of(read_settings(None, SMALL), "tiny", needs)

    def use() -> tuple[Any, dict[str, Any]]:
        supervisor.tell(model=str(tiny_model), settings=tables, kv_limit=8 * MIB)
        try:
            assert supervisor.hear("loaded")["of"] > 0
            supervisor.hear("ready")
            transport = httpx2.HTTPTransport(uds=supervisor.path)
            with httpx2.Client(
                transport=transport, base_url="http://localhost", timeout=DEADLINE_S
            ) as client:
                answer = client.post(
                    COMPLETIONS, json=prompt("abc", max_tokens=2, model="whatever")
                )
            supervisor.tell(ping=True, number=3)
            while supervisor.hear("number") != {"number": 3}:
                pass
            supervisor.tell(kv_limit=0, number=7)
            return answer.json(), supervisor.hear("number")
        finally:
            supervisor.tell(stop=True)

    with ThreadPoolExecutor(1) as clients:
        using = clients.submit(use)
        assert run_process(supervisor, monkeypatch) == 0
        answer, told = using.result()
    assert answer["usage"]["completion_tokens"] == 2
    while told["number"] != 7:
        told = supervisor.hear("number")
    assert 0 < told["kv_limit"] < 8 * MIB, "one sequence fits all the same"
    assert "low power mode" not in capsys.readouterr().err, "the front says it"


def test_a_process_says_why_it_cannot_serve(
    tmp_path: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = json.loads(json.dumps(read_settings(None, SMALL).model_dump(), default=str))
    supervisor.tell(model=str(tmp_path), settings=tables, kv_limit=1)
    assert run_process(supervisor, monkeypatch) == MODEL_ERROR
    assert "config.json" in supervisor.hear("failed")["failed"]


def test_a_process_whose_supervisor_has_gone_ends(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.close()
    assert run_process(supervisor, monkeypatch) == 0


def test_nobody_need_hear_what_a_process_tells() -> None:
    ours, theirs = socket.socketpair()
    with theirs, model_process.Control(theirs) as control:
        ours.close()
        control.tell(ready=True)
        assert control.read() is None


@pytest.mark.parametrize("module", ["json", "re", "asyncio", "typing", "socket", "server"])
def test_a_models_process_imports_nothing_of_the_folder_it_is_started_in(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / f"{module}.py").write_text("open('imported', 'w').close()\n")
    subprocess.run([*COMMAND, "0"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "imported").exists()
