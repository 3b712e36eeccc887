"""The announcement that a server listens: a page of text for people, or a log entry in JSON."""

import socket
from collections.abc import Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

import structlog

from engine.build import EnginePlan
from kvcache.budget import gib
from server.catalogue.names import printable
from server.config import WILDCARDS, Config
from server.http.guards.keys import only_this_machine

NAME_COLUMNS = 11
# The banner names at most this many models and counts the rest.
NAMED_MODELS = 8

log = structlog.get_logger("quire")


def announce(settings: Config, plan: EnginePlan, model: str, url: str) -> None:
    """Announce a server of one model. model: the model's name for clients."""
    serving, memory = f"serving {model} on {url}", plan.memory
    if settings.log.format == "json":
        about = {"device": plan.device, "drafts": plan.draft_source}
        log.info(serving, model=model, url=url, **about, **memory.figures())
        return
    lines = [
        (
            "model",
            f"{model}: context {memory.max_model_len} tokens, {memory.max_num_seqs} requests at a "
            "time",
        ),
        ("memory", f"{memory.line()}; --log-level debug has the sum"),
        *([("", memory.note)] if memory.note else []),
        ("device", plan.device),
        ("drafts", plan.draft_source),
    ]
    generates = not plan.checkpoint.embeds
    log.info(serving, banner=banner(settings, serving, url, lines, generates=generates))


def announce_several(settings: Config, models: Sequence[str], budget_bytes: int, url: str) -> None:
    """Announce a server of several models. budget_bytes: memory for all models together."""
    serving = f"serving {len(models)} models on {url}"
    if settings.log.format == "json":
        log.info(serving, models=list(models), url=url, memory_budget_bytes=budget_bytes)
        return
    more = len(models) - NAMED_MODELS
    named = [*models[:NAMED_MODELS], *([f"and {more} more: `quire models`"] if more > 0 else [])]
    keep_s = settings.models.keep_alive_s
    how_long = "" if keep_s < 0 else f" for {keep_s / 60:g} min after its last request"
    lines = [
        *[("models" if number == 0 else "", name) for number, name in enumerate(named)],
        ("memory", f"{gib(budget_bytes)} for all together; a model is loaded when it is asked for"),
        ("", f"and stays{how_long}"),
    ]
    log.info(serving, banner=banner(settings, serving, url, lines, generates=True))


def banner(
    settings: Config, serving: str, url: str, lines: Sequence[tuple[str, str]], *, generates: bool
) -> str:
    """Return the banner. lines: (subject, text). generates: whether the model answers in text."""
    parts = urlsplit(url)
    # For clients on this machine, localhost takes the place of a wildcard address.
    client = f"http://localhost:{parts.port}" if parts.hostname in WILDCARDS else url
    page = [("page", f"{client}/  (open it in a browser)")] if settings.server.page else []
    anthropic = [("", f"ANTHROPIC_BASE_URL={client}")] if generates else []
    clients = [("clients", f"OPENAI_BASE_URL={client}/v1"), *anthropic]
    lines = [*page, *clients, ("API key", key_rule(settings)), *lines, ("end", "Ctrl-C")]
    text = "".join(f"  {name:<{NAME_COLUMNS}}{printable(value)}\n" for name, value in lines)
    return f"quire {version('quire')}: {printable(serving)}\n\n{text}"


def key_rule(settings: Config) -> str:
    """Return the banner's text about the API key that clients send."""
    if settings.access.api_keys:
        return "one of access.api_keys, as OPENAI_API_KEY or ANTHROPIC_AUTH_TOKEN"
    if only_this_machine(settings.server.host):
        return "any (local only)"
    return f"any (everybody who reaches {socket.gethostname()} may ask)"
