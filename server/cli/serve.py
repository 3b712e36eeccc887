"""Starts a server: settings -> port -> plan -> tokenizer -> weights -> engine -> uvicorn. Errors
of settings and of the model end the start with one sentence each, before weights are fetched or
loaded and before a client can connect."""

import socket
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions

import structlog

from engine.build import EnginePlan, build_engine
from engine.client import EngineClient
from engine.machine import memory_pressure, raise_descriptor_limit, use_one_arena
from engine.monitor import EngineMonitor
from engine.power import KeepAwake, power_of
from kvcache.child import Child
from kvcache.selftest.machine import footprint_with
from server.catalogue.download import bytes_bar
from server.chat.drain import Drain
from server.chat.salts import Salts
from server.chat.served_model import ServedModel
from server.cli.banner import announce
from server.cli.log import configure_log
from server.cli.model_files import ModelFiles, read_model
from server.cli.salt_secret import read_salts
from server.config import Config, StartError, engine_config
from server.http.app import freeze_objects
from server.http.guards.keys import check_access, only_this_machine
from server.http.listener import reserve, reserved_for_ollama
from server.http.server import listen
from server.metrics import Metrics
from server.metrics.registry import About
from server.routes.service import Service
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.vocabulary import Vocabulary
from server.text.grammar.worker import GrammarLimits, GrammarWorker
from server.text.tokenizer import Tokenizer

PACKAGES = ("server", "engine", "kvcache", "metal_ext")
OURS = "quire"
STOP_TIMEOUT_S = 30.0
Progress = Callable[[int, int], None]
Ready = Callable[[EngineClient, Drain, str], None]

log = structlog.get_logger("quire")


class EngineError(StartError):
    """Raised if the engine failed."""

    exit_code = 1


class KVBackendFailedError(EngineError):
    """Raised if the GPU's memory for K and V failed. The next start uses another kind of memory."""

    exit_code = 4


def serve_model(name: str, settings: Config, reading: Child | None = None) -> None:
    """Serve one model until a signal arrives. reading: as for ``read_model``. Raises StartError."""
    use_one_arena()
    raise_descriptor_limit()  # before the engine opens file descriptors for its memory
    begin_serving(settings)
    salts = read_salts(settings.access.salt_secret_file)
    with (
        reserve(settings.server.host, settings.server.port) as listener,
        reserved_for_ollama(settings.server) as others,
    ):
        serve_on(listener, settings, salts, read_model(name, settings, reading), others=others)


def begin_serving(settings: Config) -> None:
    """Configure the log, and check a server's settings. Raises StartError."""
    configure_log(settings.log)
    if (strangers := neighbours()) is not None:
        log.warning(strangers)
    check_access(settings)


def neighbours() -> str | None:
    """Return a warning if other projects have installed packages whose names quire also uses, else
    None. RECORD files are searched as text: parsing them would take most of the start's time."""
    owners: dict[str, list[str]] = {}
    for distribution in distributions():
        files = "\n" + (distribution.read_text("RECORD") or "")
        packages = [name for name in PACKAGES if f"\n{name}/" in files or f"\n{name}.py," in files]
        if packages and (whose := distribution.metadata["Name"]) != OURS:
            for package in packages:
                owners.setdefault(package, []).append(whose)
    if not owners:
        return None
    others = ", ".join(f"`{package}` of {' and '.join(of)}" for package, of in owners.items())
    return (
        f"quire shares its place with {others}, and one overwrites files of the other: install "
        "quire where it is alone (uv tool install, pipx)"
    )


def serve_on(
    listener: socket.socket,
    settings: Config,
    salts: Salts,
    model: ModelFiles,
    *,
    progress: Progress | None = None,
    ready: Ready | None = None,
    others: Sequence[socket.socket] = (),
) -> None:
    """Load the weights and serve. progress: called with loaded and total bytes; None shows a bar.
    ready: called when clients can connect. others: more listening sockets. Raises StartError."""
    client, grammars, monitor = start_model(settings, model, progress, salts.digest_key)
    try:
        about = About(
            model=model.served.id,
            kv_backend=model.plan.kv_backend.kv_backend.setting,
            arithmetic=model.plan.arithmetic,
            max_model_len=model.plan.memory.max_model_len,
        )
        metrics = Metrics(client, about, settings=settings.metrics, footprint=footprint_with)
        service = Service(settings, model.served, model.tokenizer, client, metrics, grammars, salts)
        freeze_objects()
        say = partial(announce, settings, model.plan, model.served.id)
        tell = partial(ready, client) if ready else lambda _, url: say(url)
        listen(settings, service, listener, tell, others)
        if not client.alive:
            raise engine_error(client, model.plan, f"{client.failure} (see the log)")
    finally:
        if not client.stop(STOP_TIMEOUT_S):
            log.error("the engine did not end in time: its memory is left to the system")
        monitor.stop()
    log.info("ended")


def start_model(
    settings: Config, model: ModelFiles, progress: Progress | None = None, key: bytes = b""
) -> tuple[EngineClient, GrammarCompiler, EngineMonitor]:
    """Start the engine, the compiler of grammars, and the engine's monitor. key: see
    ``build_engine``. Raises EngineError."""
    client = start_engine(settings, model.plan, progress, key)
    checkpoint = model.plan.checkpoint
    grammars = grammar_compiler(settings, model.tokenizer, model.served, checkpoint.vocab_size)
    if not checkpoint.embeds and (warning := grammars.load()):
        log.warning(warning)
    monitor = EngineMonitor(
        client,
        watchdog_s=settings.engine.watchdog_s,
        exit_code=lambda: engine_error(client, model.plan).exit_code,
        pressure=memory_pressure if settings.cache.heed_pressure else None,
        awake=keep_awake(settings),
    )
    monitor.start()
    return client, grammars, monitor


def keep_awake(settings: Config) -> KeepAwake | None:
    """Return the lock that keeps this machine awake during answers, or None if the system or the
    settings do not allow that. Log a warning if a Mac is in low power mode."""
    power = power_of()
    if power is None or not settings.server.keep_awake:
        return None
    if power.saves():
        log.warning(
            "this Mac is in its low power mode: answers take two to three times as long (System "
            "Settings > Battery)"
        )
    return KeepAwake(power, others_may_ask=not only_this_machine(settings.server.host))


def grammar_compiler(
    settings: Config,
    tokenizer: Tokenizer,
    model: ServedModel,
    vocab_size: int,
    kind: type[GrammarCompiler] = GrammarCompiler,
) -> GrammarCompiler:
    """Return the compiler of grammars, which reads the tokenizer at its first use."""
    limits = GrammarLimits.of(settings.limits)
    return kind(
        Vocabulary(tokenizer, vocab_size, model.stop_token_ids),
        lambda vocabulary: GrammarWorker(vocabulary.text, vocabulary.facts, limits),
        limits,
    )


def start_engine(
    settings: Config, engine_plan: EnginePlan, progress: Progress | None = None, key: bytes = b""
) -> EngineClient:
    """Load the weights and start the engine. progress: see ``serve_on``. key: see
    ``build_engine``. Raises EngineError."""
    bar = bytes_bar("loading")
    several_keys = len(settings.access.api_keys) > 1

    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    client = EngineClient(
        partial(build_engine, engine_plan, engine_config(settings), progress or advance, key=key),
        max_queue=settings.limits.max_queued_requests,
        max_share_ratio=settings.limits.max_key_share_ratio if several_keys else 1.0,
    )
    try:
        client.start()
    except Exception as error:
        log.debug("the engine did not start", exc_info=True)
        why = f"the engine did not start: {error}"
        raise engine_error(client, engine_plan, why) from error
    finally:
        bar.close()
    return client


def engine_error(client: EngineClient, plan: EnginePlan, reason: str = "") -> EngineError:
    if not (plan.on_gpu and client.kv_backend_failed):
        return EngineError(reason)
    return KVBackendFailedError(
        f"{reason}; the GPU's memory of K and V has failed, and from the next start on something "
        "else serves, until `quire doctor --stress` finds that it works again"
    )
