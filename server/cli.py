"""The command line: everything is put together here.

Exit codes: 0 after a clean end, 1 when the engine failed, 2 for settings that cannot work, 3 for a
model that cannot be served.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import metal_ext  # before anything that imports MLX: it loads the BLAS

import psutil
import structlog
import typer
import uvicorn
from pydantic import ValidationError
from pydantic_settings import SettingsError
from tqdm import tqdm

from engine.build import EngineConfig, EnginePlan, MachineMemory, build_engine, plan_engine
from engine.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.client import EngineClient
from engine.weights import Arithmetic
from kvcache.layout import LayoutError
from kvcache.memory_budget import BudgetError
from server.app import create_app
from server.config import Config, load
from server.hub import (
    ModelNotFoundError,
    SamplingDefaultsError,
    find_model,
    model_names,
    sampling_defaults,
)
from server.log import configure_log
from server.metrics import Metrics
from server.service import ServedModel, Service
from server.text.tokenizer import Tokenizer, TokenizerError

EXIT_ENGINE, EXIT_SETTINGS, EXIT_MODEL = 1, 2, 3
STOP_TIMEOUT_S = 30.0
HEAD_OF_LINE = "quire"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
log = structlog.get_logger("quire")


class StartError(Exception):
    """The server cannot start: one sentence and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    """The ``quire`` command."""
    try:
        app()
    except SystemExit as end:
        # Python joins a thread before the thread-local objects of MLX are gone from it. These ask
        # for the interpreter, and abort the process when it is being torn down: so it never is.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


Model = Annotated[str, typer.Argument(help="A model's folder, or its id on the hub.")]
File = Annotated[Path | None, typer.Option("--config", help="A TOML file: see configs/quire.toml.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
Name = Annotated[str | None, typer.Option(help="What clients call the model.")]
Substrate = Annotated[str | None, typer.Option(help="auto, posix or dense.")]
Size = Annotated[str | None, typer.Option(help="A size such as 4GiB.")]
Count = Annotated[int | None, typer.Option()]


@app.command()
def serve(
    model: Model,
    config: File = None,
    host: Host = None,
    port: Port = None,
    served_model_name: Name = None,
    substrate: Substrate = None,
    kv_budget: Size = None,
    headroom: Size = None,
    page_size: Size = None,
    heap_size: Size = None,
    free_slack: Size = None,
    kv_dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    max_model_len: Count = None,
    max_num_seqs: Count = None,
    max_num_batched_tokens: Count = None,
    step_time_target_ms: Annotated[float | None, typer.Option()] = None,
    arithmetic: Annotated[
        str | None, typer.Option(help="auto, stored, float32 or quantized-float32.")
    ] = None,
    threads: Count = None,
    blas_threads: Count = None,
    check_every_step: Annotated[
        bool | None, typer.Option(help="Check the cache's invariants after every step.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve a model to OpenAI clients."""
    flags: dict[str, dict[str, Any]] = {
        "server": {"host": host, "port": port, "served_model_name": served_model_name},
        "engine": {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "step_time_target_ms": step_time_target_ms,
            "arithmetic": arithmetic,
            "threads": threads,
            "blas_threads": blas_threads,
            "check_every_step": check_every_step,
        },
        "cache": {
            "substrate": substrate,
            "kv_budget": kv_budget,
            "headroom": headroom,
            "page_size": page_size,
            "heap_size": heap_size,
            "free_slack": free_slack,
            "dtype": kv_dtype,
        },
        "log": {"level": log_level},
    }
    _exit_cleanly(lambda: _serve(model, config, flags))


@app.command()
def plan(model: Model, config: File = None) -> None:
    """Print how a model and its cache would lie in this machine's memory; load nothing."""

    def show() -> None:
        settings = _settings(config, {})
        folder = _find(model)
        typer.echo(_describe(_plan(settings, _read(folder))))

    _exit_cleanly(show)


# --- the parts of serving --------------------------------------------------------------------


def _serve(name: str, file: Path | None, flags: dict[str, dict[str, Any]]) -> None:
    settings = _settings(file, flags)
    configure_log(settings.log)
    folder = _find(name)
    checkpoint = _read(folder)
    engine_plan = _plan(settings, checkpoint)
    for line in _describe(engine_plan).splitlines():
        log.info(line)
    tokenizer = _tokenizer(folder, checkpoint)
    model = ServedModel(
        model_names(name, folder, settings.server.served_model_name),
        _sampling_defaults(folder),
        frozenset(checkpoint.eos_token_ids or _eos_of(tokenizer)),
    )
    client = _start_engine(settings, engine_plan)
    try:
        _listen(settings, Service(settings, model, tokenizer, client, Metrics(client)))
        if not client.alive:
            raise StartError("the engine has failed: see the log", EXIT_ENGINE)
    finally:
        client.stop(STOP_TIMEOUT_S)


def _listen(settings: Config, service: Service) -> None:
    """Binds the port and serves until told to end."""
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(service),
            host=settings.server.host,
            port=settings.server.port,
            http="h11",
            h11_max_incomplete_event_size=settings.limits.max_header_bytes,
            ws="none",
            timeout_keep_alive=settings.limits.keep_alive_s,
            timeout_graceful_shutdown=settings.server.drain_s,
            server_header=False,
            proxy_headers=False,
            access_log=False,
            log_config=None,
            log_level="warning",
        )
    )
    # uvicorn raises the signal that ended it again, for whoever listened before: it has done its
    # work, and the process ends with 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    with _bind(settings.server.host, settings.server.port) as listener:
        host, port = listener.getsockname()[:2]
        log.info(
            f"serving {service.model.id} on http://{host}:{port}",
            max_model_len=service.max_model_len,
        )
        server.run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """Bound by us, so that the log can name the port that 0 stands for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartError(
            f"setting server.port: {host}:{port} cannot be listened on: {error.strerror}",
            EXIT_SETTINGS,
        ) from error


def _start_engine(settings: Config, engine_plan: EnginePlan) -> EngineClient:
    bar = tqdm(
        unit="B", unit_scale=True, unit_divisor=1024, desc="loading", disable=None, leave=False
    )

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    client = EngineClient(
        lambda emit: build_engine(engine_plan, _engine_config(settings), progress, emit),
        max_queue=settings.limits.max_queued_requests,
        max_backlog=settings.limits.max_stream_backlog_events,
    )
    try:
        client.start()
    except Exception as error:
        log.debug("the engine did not start", exc_info=True)
        raise StartError(f"the engine did not start: {error}", EXIT_ENGINE) from error
    finally:
        bar.close()
    return client


def _engine_config(settings: Config) -> EngineConfig:
    engine, cache = settings.engine, settings.cache
    return EngineConfig(
        substrate=cache.substrate,
        arithmetic=None if engine.arithmetic == "auto" else Arithmetic(engine.arithmetic),
        kv_dtype=None if cache.dtype == "auto" else cache.dtype,
        page_bytes=cache.page_size,
        heap_bytes=cache.heap_size,
        kv_budget_bytes=cache.kv_budget,
        free_slack_bytes=cache.free_slack,
        headroom_bytes=cache.headroom,
        mlx_cache_bytes=engine.mlx_cache_bytes,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        step_time_target_ms=engine.step_time_target_ms,
        threads=engine.threads,
        blas_threads=engine.blas_threads,
        idle_release_s=cache.idle_release_s,
        check_every_step=engine.check_every_step,
    )


def _plan(settings: Config, checkpoint: Checkpoint) -> EnginePlan:
    memory = psutil.virtual_memory()
    machine = MachineMemory(memory.total, memory.available)
    try:
        return plan_engine(_engine_config(settings), checkpoint, machine)
    except (BudgetError, LayoutError) as error:
        raise StartError(str(error), EXIT_SETTINGS) from error


def _describe(engine_plan: EnginePlan) -> str:
    blas = metal_ext.fast_blas.name if metal_ext.fast_blas else "MLX's own"
    lines = [
        f"arithmetic: {engine_plan.arithmetic.arithmetic.value} "
        f"({engine_plan.arithmetic.reason}); matrix products: {blas}",
        f"substrate: {engine_plan.substrate}; kernels: {metal_ext.instruction_sets()[0]}, "
        f"{engine_plan.threads} threads",
    ]
    return "\n".join(engine_plan.memory.lines() + lines)


# --- what can be wrong at the start ----------------------------------------------------------


def _settings(file: Path | None, flags: dict[str, dict[str, Any]]) -> Config:
    given = {
        section: {key: value for key, value in fields.items() if value is not None}
        for section, fields in flags.items()
    }
    try:
        return load(file, {section: fields for section, fields in given.items() if fields})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise StartError(f"setting {place}: {problem['msg']}", EXIT_SETTINGS) from error
    except SettingsError as error:
        raise StartError(f"environment: {error}", EXIT_SETTINGS) from error
    except (OSError, ValueError) as error:
        raise StartError(f"{file}: {error}", EXIT_SETTINGS) from error


def _find(name: str) -> Path:
    try:
        return find_model(name)
    except ModelNotFoundError as error:
        raise StartError(str(error), EXIT_MODEL) from error


def _read(folder: Path) -> Checkpoint:
    try:
        return read_checkpoint(folder)
    except CheckpointError as error:
        raise StartError(str(error), EXIT_MODEL) from error


def _tokenizer(folder: Path, checkpoint: Checkpoint) -> Tokenizer:
    try:
        tokenizer = Tokenizer(folder)
    except TokenizerError as error:
        raise StartError(str(error), EXIT_MODEL) from error
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise StartError(
            f"{folder / 'tokenizer.json'}: it has {tokenizer.vocab_size} tokens, but config.json's "
            f"vocab_size is {checkpoint.vocab_size}",
            EXIT_MODEL,
        )
    return tokenizer


def _sampling_defaults(folder: Path) -> dict[str, Any]:
    try:
        return sampling_defaults(folder)
    except SamplingDefaultsError as error:
        raise StartError(str(error), EXIT_MODEL) from error


def _eos_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _exit_cleanly(body: Any) -> None:
    try:
        body()
    except StartError as error:
        print(f"{HEAD_OF_LINE}: {error}", file=sys.stderr)
        raise typer.Exit(error.code) from error
