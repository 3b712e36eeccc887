"""Ollama's fields, one rule each, and ``options``: its names of sampling -> those of all APIs."""

import math
import re
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from server.config import LimitsSection
from server.protocol.common import (
    MANY_STOPS,
    ListOf,
    SamplingFields,
    Seed,
    TopK,
    Whole,
    WireModel,
)
from server.protocol.fields import (
    MODEL,
    SAMPLING_FIELDS,
    SPEED_ONLY,
    FieldRule,
    Rule,
    accepted,
    ignored,
    refuse_unsupported,
    refused,
)
from server.protocol.wire_errors import invalid

OPENAI = "/v1/chat/completions"
NO_CUT = "a prompt is never cut"
ABOUT_THE_REQUEST = {"model", "stream", "stream_options"}

COMMON_FIELDS = (
    accepted("model", MODEL),
    accepted("keep_alive", "checked; the one model that is served stays"),
    accepted("cache_salt", "only requests with the same one share prefixes"),
)

ANSWER_FIELDS = (
    *COMMON_FIELDS,
    accepted("stream", "lines of JSON, unless it is false"),
    accepted("format", '"json", or a JSON schema'),
    accepted("think", "false: no thoughts; low and medium have budgets; thinking has them"),
    accepted("options", "a table of their own"),
    accepted("logprobs", "of every token, thoughts and calls included"),
    accepted("top_logprobs", "needs logprobs"),
    ignored("truncate", NO_CUT),
    ignored("shift", NO_CUT),
)

OLLAMA_CHAT_FIELDS = (
    accepted(
        "messages",
        "system, user, assistant, tool; where the last one is the assistant's, it is continued; "
        "none: answered at once",
    ),
    accepted("tools", "functions"),
    *ANSWER_FIELDS,
    refused("tool_choice", f"use {OPENAI}", "auto"),
    refused("template", "the template is the model's"),
)

OLLAMA_GENERATE_FIELDS = (
    accepted("prompt", "what a user says; with raw a text to go on with; none: answered at once"),
    accepted("system", "what stands before it"),
    accepted("raw", "true: the prompt is not put into the model's template"),
    accepted("images", "as setting images.ollama says"),
    *ANSWER_FIELDS,
    refused("template", "the template is the model's"),
    refused("suffix", "write the model's own tokens for it into a raw prompt"),
    refused("context", "send the conversation to /api/chat"),
    refused("width", "this model writes text"),
    refused("height", "this model writes text"),
    refused("steps", "this model writes text"),
)

OLLAMA_EMBED_FIELDS = (
    accepted("input", "a text or a list of texts; nothing: answered at once"),
    *COMMON_FIELDS,
    accepted("dimensions", "the first so many numbers, at length 1 again; 1 to the model's size"),
    ignored("truncate", "an input that is too long is refused, never cut"),
    ignored("options", "they are about answers, and memory"),
)

OLLAMA_EMBEDDINGS_FIELDS = (
    accepted("prompt", "a text; nothing: answered at once"),
    *COMMON_FIELDS,
    ignored("options", "they are about answers, and memory"),
)

SHOW_FIELDS = (
    accepted("model", MODEL),
    accepted("name", "the same, of older clients"),
    ignored("verbose", "there is no more to tell"),
    ignored("options", "they are about answers, and memory"),
    refused("system", "it is the model's own that is shown"),
    refused("template", "it is the model's own that is shown"),
)

OPTIONS = (
    accepted("temperature", "0 to 2; 0 is greedy"),
    accepted("top_p", "0 to 1"),
    accepted("top_k", "0 and -1 switch it off"),
    accepted("min_p", "0 to 1"),
    accepted("repeat_penalty", "0.01 to 10, over prompt and generated tokens"),
    accepted("presence_penalty", "-2 to 2, over all generated tokens"),
    accepted("frequency_penalty", "-2 to 2, over all generated tokens"),
    accepted("repeat_last_n", "0: no penalties; else they count all tokens"),
    accepted("seed", "as elsewhere; -1 draws one"),
    accepted("stop", "a list, or a string; no part of one is sent"),
    accepted("num_predict", "0, -1 and -2: as many as fit; more than fit is cut"),
)
# Of Ollama's API page, of this year and of others.
SAMPLERS = ("typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta")
OWN_NAMES = {rule.name for rule in OPTIONS} | set(SAMPLERS)
INSTEAD = {
    "max_tokens": "use num_predict",
    "n_predict": "use num_predict",
    "repetition_penalty": "use repeat_penalty",
    "cache_salt": "it stands beside the options",
}


def _elsewhere(rule: FieldRule) -> FieldRule:
    """Refuse what the other APIs have or refuse, and Ollama does not know."""
    note = f"use {OPENAI}" if rule.rule is Rule.ACCEPTED else rule.note
    harmless = (1,) if rule.name == "n" else rule.harmless
    return refused(rule.name, INSTEAD.get(rule.name, note), *harmless)


OPTION_FIELDS = (
    *OPTIONS,
    *(
        _elsewhere(rule)
        for rule in SAMPLING_FIELDS
        if rule.rule is not Rule.IGNORED and rule.name not in OWN_NAMES | ABOUT_THE_REQUEST
    ),
    ignored("num_ctx", "the context is what the server has: no model is loaded again for it"),
    ignored("num_keep", NO_CUT),
    *(ignored(name, "temperature, top_k, top_p and min_p alone count") for name in SAMPLERS),
    ignored("penalize_newline", "Ollama does nothing with it either"),
    *(
        ignored(name, SPEED_ONLY)
        for name in (
            *("num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv"),
            *("use_mmap", "use_mlock", "draft_num_predict"),
        )
    ),
    ignored("logits_all", "use logprobs"),
    ignored("vocab_only", "the model is loaded whole"),
    ignored("embedding_only", "the model is what it is"),
)


# Go's durations: https://pkg.go.dev/time#ParseDuration.
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
NUMBER = r"(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})"
PART = re.compile(f"({NUMBER})(ns|us|µs|μs|ms|s|m|h)")
DURATION = re.compile(f"([+-]?)((?:{PART.pattern})+|{NUMBER})", re.ASCII)


def keep_alive_s(value: float | str | None) -> float | None:
    """Return for how many seconds; infinity for ever, where it is below 0; 0 for not at all; None
    where nothing is said. value: seconds, or a duration such as "10m" or "1h30m"; a text without
    unit is seconds, too. Raises ApiError (400)."""
    if value is None:
        return None
    seconds = _seconds(value) if isinstance(value, str) else value
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float:
    found = DURATION.fullmatch(text.strip())
    if found is None:
        raise invalid(
            'keep_alive is no duration: write seconds, or a text such as "10m"; -1 is for ever, 0 '
            "is not at all.",
            "keep_alive",
        )
    sign, whole = found[1], found[2]
    parts = PART.findall(whole)
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    return (seconds if parts else float(whole)) * (-1 if sign == "-" else 1)


LENGTH_PARAM = "options.num_predict"

Penalty = Annotated[float, Field(ge=-2, le=2)]


class OllamaSampling(SamplingFields):
    """The sampling fields of a request of Ollama's."""

    stop_param: ClassVar[str] = "options.stop"
    stops_factor: ClassVar[int] = MANY_STOPS

    stop: tuple[str, ...] = ()

    def stop_strings(self) -> tuple[str, ...]:
        return self.stop


class Options(WireModel):
    """How an answer is sampled; server/protocol/ollama/fields.py says what becomes of each."""

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[tuple[FieldRule, ...]] = OPTION_FIELDS

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Whole | None = None
    seed: Seed | None = None
    stop: str | ListOf[str] | None = None
    num_predict: Whole | None = Field(default=None, ge=-2, le=2**31 - 1)

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the option."""
        refuse_unsupported(self.rules, self.model_extra or {})
        self.sampling.check(limits)

    @property
    def sampling(self) -> OllamaSampling:
        """The same in the names of all APIs."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        penalized = self.repeat_last_n != 0
        return OllamaSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty if penalized else 1.0,
            presence_penalty=self.presence_penalty if penalized else None,
            frequency_penalty=self.frequency_penalty if penalized else None,
            seed=self.seed,
            stop=stop,
        )

    @property
    def max_tokens(self) -> int | None:
        """The longest answer that is wanted; None: as long as fits."""
        wanted = self.num_predict or 0
        return wanted if wanted > 0 else None
