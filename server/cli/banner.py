"""What is said when a server listens: where, what it serves, and what clients want to be told."""

import socket
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

import structlog

from engine.build import EnginePlan
from kvcache.memory_budget import gib
from server.catalogue.names import printable
from server.config import WILDCARDS, Config
from server.http.guards.keys import only_this_machine

NAME_COLUMNS = 11
# Of several models, the first ones.
NAMED_MODELS = 8

log = structlog.get_logger("quire")


def announcement(settings: Config, plan: EnginePlan, model: str) -> Callable[[str], None]:
    """Return what says that a server listens at an address: to people a page of text, to machines
    one entry with the sum of the memory. model: what clients call it."""

    def announce(url: str) -> None:
        serving = f"serving {model} on {url}"
        if settings.log.format == "json":
            figures = plan.memory.figures()
            log.info(serving, model=model, url=url, device=plan.device, **figures)
        else:
            log.info(serving, banner=banner(settings, plan, model, url))

    return announce


def banner(settings: Config, plan: EnginePlan, model: str, url: str) -> str:
    """Return the text for people. url: the address that is listened on."""
    memory = plan.memory
    lines = [("clients", f"OPENAI_BASE_URL={client_url(url)}/v1")]
    if not plan.checkpoint.embeds:
        lines.append(("", f"ANTHROPIC_BASE_URL={client_url(url)}"))
    if settings.server.page:
        lines.insert(0, ("page", f"{client_url(url)}/  (open it in a browser)"))
    lines += [
        ("key", key_rule(settings)),
        ("model", f"{model}: max_model_len={memory.max_model_len}, {memory.max_num_seqs} at once"),
        ("memory", f"{memory.line()}; --log-level debug has the sum"),
        ("device", plan.device),
        ("end", "Ctrl-C"),
    ]
    return page_of(f"serving {model} on {url}", lines)


def announce_several(settings: Config, url: str, models: Sequence[str], budget_bytes: int) -> None:
    """Say that a server of several models listens. url: the address. budget_bytes: of all."""
    serving = f"serving {len(models)} models on {url}"
    if settings.log.format == "json":
        log.info(serving, models=list(models), url=url, memory_budget_bytes=budget_bytes)
        return
    more = len(models) - NAMED_MODELS
    named = [*models[:NAMED_MODELS], *([f"and {more} more: `quire models`"] if more > 0 else [])]
    stays = settings.models.keep_alive_s
    kept = "stays" if stays < 0 else f"stays for {stays / 60:g} min after its last request"
    lines = [
        ("clients", f"OPENAI_BASE_URL={client_url(url)}/v1"),
        ("", f"ANTHROPIC_BASE_URL={client_url(url)}"),
        ("key", key_rule(settings)),
        *[("models" if number == 0 else "", name) for number, name in enumerate(named)],
        ("memory", f"{gib(budget_bytes)} for all together; a model is loaded when it is asked for"),
        ("", f"and {kept}"),
        ("end", "Ctrl-C"),
    ]
    if settings.server.page:
        lines.insert(0, ("page", f"{client_url(url)}/  (open it in a browser)"))
    log.info(serving, banner=page_of(serving, lines))


def page_of(serving: str, lines: Iterable[tuple[str, str]]) -> str:
    """Return a page of text. lines: what each is about, and what it says."""
    text = "".join(f"  {name:<{NAME_COLUMNS}}{printable(value)}\n" for name, value in lines)
    return f"quire {version('quire')}: {printable(serving)}\n\n{text}"


def client_url(url: str) -> str:
    """Return the address that a client of this machine takes for one that is listened on."""
    parts = urlsplit(url)
    return f"http://localhost:{parts.port}" if parts.hostname in WILDCARDS else url


def key_rule(settings: Config) -> str:
    """Say which key clients send."""
    if settings.access.api_keys:
        return "one of access.api_keys, as OPENAI_API_KEY or ANTHROPIC_AUTH_TOKEN"
    if only_this_machine(settings.server.host):
        return "any: only programs of this machine reach it"
    return f"any: whoever reaches {socket.gethostname()} may ask"
