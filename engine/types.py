"""Types that the engine and its users share. No MLX here, and no text."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.figures import Distributions as Distributions
from engine.figures import EngineStats as EngineStats
from engine.figures import Histogram as Histogram
from engine.figures import HistogramCounts as HistogramCounts
from engine.figures import MlxMemory as MlxMemory
from kvcache.block_hashes import BlockHashes as BlockHashes
from kvcache.block_hashes import PrefixSalt as PrefixSalt
from kvcache.prefix_index import MissReason as MissReason
from kvcache.state_cache import NO_TURNS as NO_TURNS
from kvcache.state_cache import Turns as Turns
from kvcache.stats import CellStats as CellStats
from kvcache.stats import KVStats as KVStats

FORM_LIMITS = "the answer's form has come to its limits"
"""How the message of a request begins that ended with a FormLimitError."""


class QueueFullError(Exception):
    """No room for so many requests now."""


class ShareFullError(QueueFullError):
    """There is room, but none for more of the same tenant."""


class PromptTooLongError(Exception):
    """A prompt that can never fit."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"{prompt_tokens} prompt tokens, {max_model_len} at most")
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class FormLimitError(Exception):
    """An answer's form cannot be followed any further, for a reason that lies in the form: fixed
    words, fit for clients."""


class EngineDeadError(Exception):
    """The engine has ended; nothing can be generated any more."""


class EngineStuckError(Exception):
    """The engine's thread hangs in a step."""


class EngineFailedError(RuntimeError):
    """Steps fail again and again, or the device is lost."""


NO_SALT = PrefixSalt()


class FinishReason(Enum):
    """Why a generation ended. A fault is never STOP."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; already validated, every field in force.

    Presence and frequency penalties count generated tokens, as OpenAI's do; the repetition penalty
    counts the prompt as well. All count the whole history.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """0 to 2**64 - 1. The same seed gives the same draws, whoever shares the batch."""
    logprobs: int | None = None
    """How many alternatives to report with each token; None reports none, not even its own."""
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """No stop token is chosen before so many tokens, unless a constraint allows nothing else."""
    prompt_logprobs: int | None = None
    """How many alternatives to report with each token of the prompt; None reports none. With a
    number, ``max_tokens`` may be 0."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        return self.penalises or bool(self.logit_bias)

    @property
    def penalises(self) -> bool:
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0
        return any(penalties)

    def holds_back_stops(self, num_generated: int) -> bool:
        """Return whether no stop token may follow so many tokens of an answer."""
        return num_generated < self.min_tokens and bool(self.stop_token_ids)


class TokenConstraint(Protocol):
    """The grammar of an answer, as far as the engine knows: which tokens may come next.

    It belongs to one request, and from its submission on to the engine's thread. Whatever it raises
    ends that request alone, with an error.
    """

    def fill_mask(self, row: np.ndarray) -> bool:
        """Fill a row with the tokens that may come next.

        row: uint32 ``[ceil(vocabulary / 32)]`` with anything in it; bit ``i % 32`` of word
        ``i // 32`` becomes 1 where token i is allowed, all others 0. False: all tokens are allowed,
        and the row means nothing. Once the answer is complete only stop tokens are allowed.
        """

    def accept(self, token_id: int) -> None:
        """Accept a generated token. Called once for each token of the answer, in order, the stop
        token that ends it included."""

    def copy(self) -> "TokenConstraint":
        """Return a copy for another answer to the same prompt; before anything was accepted."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PromptOptions:
    """The fields that a submission and its requests have in common."""

    priority: int = 0
    """Lower runs earlier."""
    salt: PrefixSalt = NO_SALT
    """Only requests of equal salts share prefixes."""
    system_tokens: int = 0
    """Leading tokens that other conversations probably begin with as well."""
    turns: Turns = NO_TURNS
    """Positions where the next prompt of its conversation may depart from it."""
    constraint: TokenConstraint | None = None
    """A submission's is copied: no two requests have the same object."""
    pooling: bool = False
    """Whether the result is the prompt's vector instead of tokens: then ``max_tokens`` is 0."""
    name: str = "unnamed"
    """In the log."""


@dataclass(frozen=True, slots=True, repr=False)
class Request(PromptOptions):
    """A client's request, in token ids."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    fork_of: int | None = None
    """A request with the same prompt, submitted before, whose pages it shares from the start."""
    submitted_s: float | None = None
    """By the engine's clock; None where its waiting time is not measured."""

    def __repr__(self) -> str:
        """Return counts only: prompts are never printed."""
        return f"Request({self.request_id}, {len(self.prompt_ids)} prompt tokens)"


@dataclass(frozen=True, slots=True, repr=False)
class Submission(PromptOptions):
    """One prompt, and an answer for each of ``params``."""

    prompt_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    beyond_queue: bool = False
    """Even when the queue is full."""

    def request(self, number: int, params: SamplingParams, **own: Any) -> Request:
        """Return the request for one answer. own: fields of Request that a submission lacks."""
        options = {each.name: getattr(self, each.name) for each in fields(PromptOptions)}
        if self.constraint is not None:
            options["constraint"] = self.constraint.copy()
        return Request(number, self.prompt_ids, params, **options, **own)


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """How much of a prompt was cached, and why not more."""

    cached_tokens: int
    """Prompt tokens whose K and V were not computed for this request."""
    left_at: int
    """The first token at which the prompt left the longest cached prefix."""
    miss: MissReason | None
    """Why it left; None when nothing more could have been shared."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, of the model's own distribution."""

    logprob: float
    """Of the chosen token, or of the prompt's own."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first."""


class TokenEvent(NamedTuple):
    """What happened to a request in a step: a token, an end, or both."""

    request_id: int
    token_id: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    message: str | None = None
    """Why, for FinishReason.ERROR: a fixed sentence without contents."""
    prefix: PrefixReport | None = None
    """With the first token of a request, and with its end."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """In a request's first event, where they are wanted: one for each token of the prompt, None for
    the first one. ``logprob`` is that of the prompt's own token, given all before it."""
    embedding: np.ndarray | None = None
    """At the end of a request that pools: float32 ``[hidden_size]`` of length 1."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine was built with; the front end refuses by these."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    embedding_size: int | None = None
    """Of the vectors that it makes, where it pools and generates nothing."""
    shared_block_tokens: int | None = None
    """Tokens of a block, where whole blocks are shared; None where nothing is."""
    keeps_states: bool = False
    """Whether a prefix can be shared only where a state of it was kept: ``Request.turns`` count."""

    def check_length(self, prompt_ids: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Check that a prompt fits, and a token behind it where an answer has any. Raises
        PromptTooLongError."""
        if len(prompt_ids) > self.max_model_len - any(each.max_tokens for each in params):
            raise PromptTooLongError(len(prompt_ids), self.max_model_len)
