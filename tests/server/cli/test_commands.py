"""The ``quire`` command: what it says and with what it ends."""

import gc
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import psutil
import pytest
import typer
from typer.core import TyperGroup

from server import cli
from server.cli import serve
from server.cli.commands import app, main
from server.cli.serve import EngineError
from server.cli.settings import FIELDS, FLAGS, default_of, read_settings
from tests.abuse.processes import port_of, serving
from tests.clients.servers import QUIRE, run_to_end
from tests.models import TINY, write_config, write_model, write_tokenizer
from tests.server.commands import ENGINE, MODEL, SETTINGS, Run, one_sentence
from tests.server.harness import CHAT, DEADLINE_S, chat

SMALL = ["--kv-budget", "16MiB", "--heap-size", "1MiB", "--free-slack", "1MiB"]
SMALL += ["--max-num-seqs", "4", "--threads", "1"]
Edit = Callable[[Path], object]
ROOT = Path(__file__).parents[3]


class NotFitting(ModuleType):
    """A module whose import ends as that of metal_ext does where MLX is another one."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("built for another mlx", name="metal_ext")


# --- what is refused, and with which exit code ------------------------------------------------


def config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def name_two_shards(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pointer(file: str) -> Edit:
    """As `git clone` leaves a file without Git LFS."""

    def edit(folder: Path) -> None:
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 558848\n"
        (folder / file).write_text(text)

    return edit


def leave_adapters(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text('{"model": "mlx/Base"}')
    (folder / "adapters.safetensors").touch()


@pytest.mark.parametrize(
    ("edit", "file", "problem"),
    [
        (name_two_shards, "model-00002-of-00002.safetensors", "does not exist"),
        (cut_off, "model.safetensors", "it was cut off"),
        *(
            (pointer(file), file, r"a pointer of Git LFS.*`git -C \S+ lfs pull`")
            for file in ("model.safetensors", "config.json", "tokenizer.json", "special.jinja")
        ),
        (
            leave_adapters,
            "",
            "these are adapters for mlx/Base, and quire serves whole models: fuse",
        ),
        (config(intermediate_size=96), "model.safetensors", "mlp.down_proj.weight|gate_proj"),
        (config(num_hidden_layers=3), "", "model.layers.2"),
        (config(num_hidden_layers=1), "model.safetensors", "model.layers.1"),
        (config(model_type="gpt2"), "config.json", "model_type is 'gpt2'"),
        (config(head_dim="wide"), "config.json", "head_dim is 'wide'"),
        (lambda folder: (folder / "config.json").unlink(), "config.json", "does not exist"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "", "tokenizer"),
        (lambda folder: write_tokenizer(folder, 2000), "tokenizer.json", "vocab_size is 1024"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"top_p": 7}'),
            "generation_config.json",
            "top_p: ",
        ),
    ],
)
def test_fault_16_a_model_that_cannot_be_served_is_named_by_file_and_field(
    quire: Run, tmp_path: Path, edit: Edit, file: str, problem: str
) -> None:
    folder = write_model(tmp_path / "model")
    edit(folder)
    line = one_sentence(quire("serve", folder), MODEL)
    assert line.startswith(f"quire: {folder / file}")
    assert re.search(problem, line)


@pytest.mark.parametrize(
    ("flag", "value", "setting"),
    [
        ("--port", "99999", "server.port"),
        ("--kv-backend", "papyrus", "cache.kv_backend"),
        ("--kv-budget", "3parsecs", "cache.kv_budget"),
        ("--max-num-seqs", "0", "engine.max_num_seqs"),
        ("--kv-dtype", "float64", "cache.dtype"),
        ("--log-level", "loud", "log.level"),
    ],
)
def test_a_wrong_flag_is_named_by_its_setting(
    quire: Run, tiny_model: Path, flag: str, value: str, setting: str
) -> None:
    line = one_sentence(quire("serve", tiny_model, flag, value), SETTINGS)
    assert line.startswith(f"quire: setting {setting}: ")


def test_memory_that_is_not_there_is_refused_with_its_figure(quire: Run, tiny_model: Path) -> None:
    line = one_sentence(quire("serve", tiny_model, "--kv-budget", "900000GiB"), SETTINGS)
    assert "900000.00 GiB does not fit" in line


@pytest.mark.skipif(sys.platform != "linux", reason="only to Linux a heap is a file")
def test_heaps_larger_than_files_may_be_are_refused_with_both_figures(
    quire: Run, tiny_model: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, limits[1]))
    try:
        line = one_sentence(quire("serve", tiny_model, "--heap-size", "4MiB"), SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "a heap of 4.00 MiB is a file" in line
    assert "none of more than 3.00 MiB: raise that limit (`ulimit -f unlimited`)" in line


def test_an_engine_that_fails_is_an_error_of_its_own(
    quire: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise EngineError("the engine did not start: no luck")

    monkeypatch.setattr(serve, "start_engine", fail)
    line = one_sentence(quire("serve", tiny_model), 1)
    assert line == "quire: the engine did not start: no luck"


def test_a_plan_takes_its_flags(quire: Run, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", TINY)
    flags = ["--context", "300", "--memory", "2GiB", "--device", "M4", "--out", tmp_path / "out"]
    result = quire("plan", folder, *flags)
    assert result.exit_code == 0, result.output
    assert "on M4 with 2.00 GiB" in result.stdout
    assert "300 each" in result.stdout
    assert (tmp_path / "out" / "fit.svg").is_file()


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a GPU")
def test_a_kv_backend_that_this_machine_lacks_is_refused_with_what_is_missing(
    quire: Run, tiny_model: Path
) -> None:
    line = one_sentence(quire("serve", tiny_model, "--kv-backend", "sparse"), SETTINGS)
    assert line == "quire: sparse is memory of a GPU: this build of quire has no Metal"


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a doctor was told who says that nothing serves."""
    from server.cli import doctor

    seen: list[tuple[Any, ...]] = []

    def examine(file: Any, flags: Any, told: Callable[[str], None], **options: bool) -> Any:
        told("everything")
        seen.append((file, flags, options))
        return "the report", not options["release_test"]

    monkeypatch.setattr(doctor, "run_doctor", examine)
    return seen


def test_the_doctor_ends_with_0_if_something_can_serve(
    quire: Run, examined: list[tuple[Any, ...]]
) -> None:
    result = quire("doctor", "--kv-backend", "posix", "--json")
    assert (result.exit_code, result.stdout) == (0, "the report\n")
    assert result.stderr == "quire: trying everything\n"
    result = quire("doctor", "--release-test")
    assert (result.exit_code, result.stdout) == (1, "the report\n")
    (_, flags, first), (_, _, second) = examined
    assert flags == {"cache": {"kv_backend": "posix"}}
    assert (first["as_json"], first["release_test"]) == (True, False)
    assert (second["as_json"], second["release_test"]) == (False, True)


@pytest.mark.parametrize("works", [True, False])
def test_the_first_hour_measures_the_demo_and_a_named_model(
    quire: Run, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    from server.cli import doctor

    def run_first_hour(_: Any, flags: Any, models: Any, told: Any, tell: Any) -> bool:
        tell(f"{flags} {models}")
        return works

    monkeypatch.setattr(doctor, "run_first_hour", run_first_hour)
    model = ["--model", "qwen3:4b"] if works else []
    result = quire("doctor", "--first-hour", "--kv-backend", "posix", *model)
    models = ["demo", *model[1:]]
    said = f"{{'cache': {{'kv_backend': 'posix'}}}} {models}\n"
    assert (result.exit_code, result.stdout) == (0 if works else 1, said)
    assert "save your work" in result.stderr


def test_the_doctor_starts_where_the_extension_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('MLX is of papyrus')")
    ended = run_to_end(QUIRE, "doctor", "--json", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert not report["serves"]
    assert "the native extension cannot be loaded" in report["extension"]["fault"]
    assert "Traceback" not in ended.stderr


HEAVY: tuple[str, ...] = ("transformers", "mlx.core", "numpy", "fastapi", "uvicorn", "structlog")
HEAVY += ("huggingface_hub", "llguidance", "tokenizers", "jinja2", "prometheus_client", "ray")
HEAVY += ("tqdm", "rich")
NOWHERE = ("--host", "127.0.0.1", "--port", "9")


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (("--version",), (*HEAVY, "httpx2")),
        (("settings",), (*HEAVY, "httpx2")),
        (("ps", *NOWHERE), HEAVY),
        (("stop", "demo", *NOWHERE), HEAVY),
        (("launch", "codex", "--print", "--url", "http://127.0.0.1:9"), HEAVY),
        (("models",), ("transformers", "uvicorn", "matplotlib", "ray")),
        (("plan", "demo"), ("transformers", "uvicorn", "matplotlib", "ray")),
        (("serve", "no-such-model"), ("transformers", "matplotlib", "ray", "torch")),
    ],
    ids=lambda value: value[0],
)
def test_a_command_imports_only_what_it_uses(
    command: tuple[str, ...], unused: tuple[str, ...], tmp_path: Path
) -> None:
    program = """
        import json, os, sys
        from server.cli import main

        def end(_, end_process=os._exit):
            with open("modules", "w") as file:
                json.dump(sorted(sys.modules), file)
            end_process(0)

        os._exit = end
        main()
    """
    environment = os.environ | {"HF_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program), *command],
        capture_output=True, timeout=DEADLINE_S, check=True, cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not set(unused) & set(json.loads((tmp_path / "modules").read_text()))


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_flag_of_serve_is_in_the_help(quire: Run, flag: str) -> None:
    result = quire("serve", flag)
    assert result.exit_code == 0
    for named in ("--config", "--kv-budget", "--disk", "--max-model-len"):
        assert named in result.stdout


def test_every_flag_says_what_it_is_for_and_what_holds_without_it() -> None:
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    settings = {name for fields in FIELDS.values() for name in fields} | set(FLAGS)
    seen = set()
    for command in commands.commands.values():
        for its in command.params:
            said = getattr(its, "help", None) or ""
            if its.name == "context" or getattr(its, "hidden", False):
                continue
            assert said.endswith("."), f"{command.name} {its.name}: {said!r}"
            if its.name in settings:
                seen.add(its.name)
                assert re.search(r" Default: .+\.$", said), f"{command.name} {its.name}: {said!r}"
    assert {"port", "heap_size", "kv_budget", "threads"} <= seen


@pytest.mark.parametrize(
    ("setting", "default"),
    [
        ("server.port", "8000"),
        ("cache.heap_size", "64MiB"),
        ("cache.kv_budget", "chosen at start"),
        ("cache.disk_per_hour", "8192MiB"),
        ("engine.check_every_step", "off"),
        ("engine.overlap", "on"),
        ("engine.drafts", "on"),
        ("engine.draft_model", "chosen at start"),
    ],
)
def test_a_default_is_told_as_people_write_it(setting: str, default: str) -> None:
    assert default_of(setting) == default


def test_the_version_is_the_packages(quire: Run) -> None:
    result = quire("--version")
    assert (result.exit_code, result.stdout) == (0, f"quire {version('quire')}\n")


def test_the_settings_that_are_printed_are_a_settings_file_with_the_defaults(
    quire: Run, tmp_path: Path
) -> None:
    result = quire("settings")
    assert result.exit_code == 0
    (tmp_path / "quire.toml").write_text(result.stdout)
    assert read_settings(tmp_path / "quire.toml", {}) == read_settings(None, {})


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_an_extension_that_does_not_fit_its_mlx_is_one_sentence(
    quire: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    module = "server.cli.serve" if command == "serve" else "server.cli.plan"
    monkeypatch.setitem(sys.modules, module, NotFitting(module))
    assert one_sentence(quire(command, "demo"), ENGINE) == "quire: built for another mlx"


def test_any_other_import_that_fails_is_a_defect(
    quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "server.cli.serve", None)
    assert isinstance(quire("serve", "demo").exception, ModuleNotFoundError)


def test_the_process_ends_with_the_code_of_the_command(
    quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    for arguments in (["plan", "no-such-model"], ["--help"], ["cook"]):
        monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        main()
    assert codes == [MODEL, 0, SETTINGS]


def test_streams_that_are_closed_lead_to_nowhere(
    quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["quire", "plan", "no-such-model"])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main()
    assert codes == [MODEL]
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev
        os.close(stream.fileno())


def test_a_folder_that_is_gone_is_left(
    quire: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gone() -> str:
        raise FileNotFoundError

    left: list[str] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "getcwd", gone)
    monkeypatch.setattr(os, "chdir", left.append)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "argv", ["quire", "--help"])
    main()
    assert left == ["/"]
    said = capsys.readouterr().err
    assert said == "quire: the working folder is gone: relative paths begin at /\n"


# --- a real process ---------------------------------------------------------------------------


def test_ctrl_c_is_a_sentence_before_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = list[object]()
    monkeypatch.setattr(
        "server.cli.commands.main", lambda: handlers.append(signal.getsignal(signal.SIGINT))
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
        gc.unfreeze()
    assert handlers != [signal.default_int_handler]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_log_of_json_has_no_other_line_before_it(quire: Run, format: str) -> None:
    stderr = quire("serve", "no-such-model", "--set", f"log.format={format}").stderr
    assert ("quire: loading no-such-model" in stderr.splitlines()) == (format == "text")


@pytest.mark.parametrize(
    "module", ["typer", "pydantic", "server.cli.launch", "server.cli.serve", "fastapi", "mlx.core"]
)
def test_an_interrupt_while_it_starts_ends_it_with_a_sentence(module: str) -> None:
    """It comes while the imports run, in which a KeyboardInterrupt may be raised anywhere."""
    program = f"""
        import os, signal, sys
        from importlib.abc import MetaPathFinder

        class Interrupted(MetaPathFinder):
            def find_spec(self, name, *_):
                if name == "{module}":
                    os.kill(os.getpid(), signal.SIGINT)

        from server.cli import main
        sys.meta_path.insert(0, Interrupted())
        sys.argv = ["quire", "serve", "somewhere"]
        main()
    """
    ended = run_to_end(sys.executable, "-c", textwrap.dedent(program))
    said = ended.stderr.removeprefix("quire: loading somewhere\n")
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "")
    assert said == "quire: ended by Ctrl-C\n"


def wake_ups(process: int) -> int:
    """How often the threads of a process have begun to wait, each time after they were woken."""
    texts = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/status")]
    return sum(int(re.findall(r"\nvoluntary_ctxt_switches:\t(\d+)", text)[0]) for text in texts)


@pytest.mark.skipif(sys.platform != "linux", reason="counted in /proc")
def test_an_idle_server_wakes_up_at_most_twice_a_second() -> None:
    with serving(Path("demo"), *SMALL, "--kv-backend", "posix") as server:
        seconds, fewest = 5.0, math.inf
        deadline = time.monotonic() + DEADLINE_S
        # Its start, and the release of memory at idle, may take longer on a busy machine.
        while fewest > 2 * seconds and time.monotonic() < deadline:
            before = wake_ups(server.process.pid)
            time.sleep(seconds)
            fewest = wake_ups(server.process.pid) - before
        assert fewest <= 2 * seconds
        dates = []
        for _ in range(2):
            time.sleep(1.1)
            dates.append(httpx2.get(f"{server.url}/health").headers["date"])
        assert dates[0] != dates[1]
        server.send(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_serves_with_all_streams_closed_puts_nothing_in_their_place(tiny_model: Path) -> None:
    command = [QUIRE, "serve", str(tiny_model), *SMALL, "--port", "0"]
    server = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    try:
        url = f"http://127.0.0.1:{port_of(psutil.Process(server.pid))}"
        with httpx2.Client(base_url=url, timeout=DEADLINE_S) as http:
            assert http.post(CHAT, json=chat(max_tokens=5)).status_code == 200
        numbers = [Path(f"/proc/{server.pid}/fd/{number}") for number in range(3)]
        assert [os.readlink(number) for number in numbers] == [os.devnull] * 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(DEADLINE_S) == 0
    finally:
        server.kill()
        server.wait()


def test_a_process_may_begin_in_a_folder_that_is_gone(tiny_model: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [QUIRE, "plan", str(tiny_model), "--context", "64"]
    ended = run_to_end("sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *command, cwd=gone)
    assert ended.returncode == 0, ended.stderr
    assert "K and V" in ended.stdout
    assert ended.stderr == "quire: the working folder is gone: relative paths begin at /\n"


def test_a_server_says_what_it_serves_where_and_how_and_that_it_ends(tmp_path: Path) -> None:
    with serving(write_model(tmp_path / "served"), *SMALL) as server:
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    text = server.text
    assert "serving served on http://127.0.0.1:" in text
    assert f"OPENAI_BASE_URL={server.url}/v1\n" in text
    assert f"ANTHROPIC_BASE_URL={server.url}\n" in text
    assert "K and V up to " in text
    assert "KV backend: posix" in text
    assert "context " in text
    assert text.index("] ending") < text.index("] ended")
    assert text.count("\n") < 17
