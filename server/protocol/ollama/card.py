"""What is said of a model before anybody asks it: /api/tags, /api/ps and /api/show."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]

# Clients refuse servers that are older than what they need. This is the first version of Ollama
# that has OpenAI's chat and responses and Anthropic's messages beside its own API, as quire has.
API_VERSION = "0.14.0"
UNKNOWN = "unknown"
FORMAT = "safetensors"
# So far away that clients show it as "forever", and near enough for every calendar.
NEVER = datetime(2300, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say of it."""

    family: str = UNKNOWN
    """``model_type`` of its config.json."""
    parameters: int = 0
    """Numbers of its weight matrices, however they are packed."""
    quantization: str = UNKNOWN
    """Of its weights: ``BF16``, ``4bit``."""
    size_bytes: int = 0
    """Of its weights as they are stored."""
    digest: str = "0" * 64
    """64 hexadecimal digits that differ where its files do."""
    modified_at: datetime = EPOCH
    weights_bytes: int = 0
    """Of its weights in memory."""
    on_gpu: bool = False
    """Whether they are memory of a GPU."""


NO_FACTS = ModelFacts()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory."""

    size_bytes: int
    """All that it takes: weights, and the K and V that it has now."""
    on_gpu: bool = False
    expires_at: datetime | None = None
    """When it will be unloaded if nobody asks it; None: never."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model, for people and programs that choose one."""

    name: str
    modified_at: datetime
    size_bytes: int
    """Of its weights as they are stored."""
    digest: str
    """64 hexadecimal digits."""
    family: str
    parameters: int
    quantization: str
    context_length: int
    """Tokens of the longest sequence that this server would have of it, loaded or not."""
    capabilities: tuple[str, ...]
    """As ``capabilities`` gives them."""
    loaded: Loaded | None = None
    template: str = ""
    """Of its conversations, as its makers wrote it."""


def model_card(
    name: str,
    facts: ModelFacts,
    context_length: int,
    capabilities: tuple[str, ...],
    *,
    loaded: Loaded | None = None,
    template: str = "",
) -> ModelCard:
    """Make the card of a model with these facts."""
    return ModelCard(
        name=name,
        modified_at=facts.modified_at,
        size_bytes=facts.size_bytes,
        digest=facts.digest,
        family=facts.family,
        parameters=facts.parameters,
        quantization=facts.quantization,
        context_length=context_length,
        capabilities=capabilities,
        loaded=loaded,
        template=template,
    )


def capabilities(*, embeds: bool, calls: bool, thinks: bool) -> tuple[str, ...]:
    """Return what a model can do, in Ollama's words. embeds: it makes vectors and no text. calls,
    thinks: its template knows tools and thoughts."""
    if embeds:
        return ("embedding",)
    return ("completion", *(["tools"] if calls else []), *(["thinking"] if thinks else []))


def tags_answer(cards: Sequence[ModelCard]) -> Json:
    """Return the models that there are, loaded or not."""
    return {
        "models": [_named(card) | {"modified_at": _time(card.modified_at)} for card in cards],
    }


def ps_answer(cards: Sequence[ModelCard]) -> Json:
    """Return the models that are loaded."""
    return {
        "models": [
            _named(card)
            | {
                "size": loaded.size_bytes,
                "size_vram": loaded.size_bytes if loaded.on_gpu else 0,
                "expires_at": _time(loaded.expires_at or NEVER),
                "context_length": card.context_length,
            }
            for card in cards
            if (loaded := card.loaded) is not None
        ]
    }


def show_answer(card: ModelCard) -> Json:
    """Return all that is said of one model."""
    info: Json = {
        "general.architecture": card.family,
        "general.basename": card.name,
        "general.parameter_count": card.parameters,
        f"{card.family}.context_length": card.context_length,
    }
    return {
        "modelfile": f"FROM {card.name}\n",
        "parameters": "",
        "license": "",
        "template": card.template,
        "details": _details(card),
        "model_info": info,
        "capabilities": list(card.capabilities),
        "modified_at": _time(card.modified_at),
    }


def version_answer() -> Json:
    """Return which version of Ollama's API this is."""
    return {"version": API_VERSION}


def _named(card: ModelCard) -> Json:
    return {
        "name": card.name,
        "model": card.name,
        "size": card.size_bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def _details(card: ModelCard) -> Json:
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": card.family,
        "families": [card.family],
        "parameter_size": _short(card.parameters),
        "quantization_level": card.quantization,
    }


def _short(parameters: int) -> str:
    """Write a number as people say it: 4.0B."""
    for size, unit in UNITS:
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _time(moment: datetime) -> str:
    """Write a time as RFC 3339 has it, with microseconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def time_from_ns(nanoseconds: int) -> str:
    """Write a time since 1970 as RFC 3339 has it, with nanoseconds."""
    seconds, rest = divmod(nanoseconds, 10**9)
    whole = EPOCH + timedelta(seconds=seconds)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{rest:09}Z"
