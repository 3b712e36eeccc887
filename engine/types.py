"""Types that the engine and its callers share; none of them needs MLX or text."""

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
from kvcache.state_cache import NO_BOUNDARIES as NO_BOUNDARIES
from kvcache.state_cache import PromptBoundaries as PromptBoundaries
from kvcache.stats import KVStats as KVStats
from kvcache.stats import SlotStats as SlotStats

FORM_LIMITS = "the answer's form has come to its limits"
"""Error messages begin with this text where a FormLimitError has ended the request."""


class QueueFullError(Exception):
    """The queue has no room for these requests now."""


class ShareFullError(QueueFullError):
    """The tenant already has its full share of the queue."""


class PromptTooLongError(Exception):
    """The prompt is longer than the model's context."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"{prompt_tokens} prompt tokens, {max_model_len} at most")
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class FormLimitError(Exception):
    """The grammar of an answer has hit a limit; the message is safe to show to clients."""


class EngineDeadError(Exception):
    """The engine has ended."""


class EngineStuckError(Exception):
    """The engine's thread hangs in a step."""


class EngineFailedError(RuntimeError):
    """Steps fail repeatedly, or the device is lost."""


NO_SALT = PrefixSalt()


class FinishReason(Enum):
    """The reason why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated parameters for choosing tokens. Presence and frequency penalties count generated
    tokens, as OpenAI's do; the repetition penalty counts the prompt's tokens as well."""

    max_tokens: int
    temperature: float = 1.0
    """0 always chooses the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 turns this filter off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """A number from 0 to 2**64 - 1. Equal seeds give equal draws, whatever else is in the batch."""
    logprobs: int | None = None
    """The number of alternatives to report with each token; None reports no log-probabilities."""
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """No stop token is chosen before this many tokens, unless a constraint allows nothing else."""
    prompt_logprobs: int | None = None
    """The same as ``logprobs`` for each token of the prompt. If set, ``max_tokens`` may be 0."""

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
        return num_generated < self.min_tokens and bool(self.stop_token_ids)


class TokenConstraint(Protocol):
    """The grammar of one request's answer. Once the request is submitted, only the engine's thread
    uses its constraint. An exception of a constraint ends only its own request."""

    def fill_mask(self, row: np.ndarray) -> bool:
        """Set the bits of the tokens that may come next; return False if every token may.

        row: uint32 ``[ceil(vocabulary / 32)]``, overwritten: bit ``i % 32`` of word ``i // 32`` is
        1 where token i is allowed. After a complete answer only stop tokens are allowed.
        """

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a generated token. Called for every token, even a stop token."""

    def copy(self) -> "TokenConstraint":
        """Return a copy for another answer to the prompt. Called before the first ``accept``."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PromptOptions:
    """The fields that Submission and Request have in common."""

    priority: int = 0
    """Lower values run earlier."""
    salt: PrefixSalt = NO_SALT
    """Only requests with equal salts share prefixes."""
    system_tokens: int = 0
    """The number of leading tokens that other conversations probably share."""
    boundaries: PromptBoundaries = NO_BOUNDARIES
    """Positions where the conversation's next prompt may begin to differ from this prompt."""
    constraint: TokenConstraint | None = None
    """Each request gets its own copy of a submission's constraint."""
    pooling: bool = False
    """Whether the result is the prompt's vector instead of tokens: then ``max_tokens`` is 0."""
    name: str = "unnamed"
    """The request's name in the log."""


@dataclass(frozen=True, slots=True, repr=False)
class Request(PromptOptions):
    """A client's request, in token ids."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    fork_of: int | None = None
    """The id of an earlier request with the same prompt, whose memory pages this request shares."""
    submitted_s: float | None = None
    """The submission time by the engine's clock; None leaves the wait out of the statistics."""

    def __repr__(self) -> str:
        """Return counts only: prompts are never printed."""
        return f"Request({self.request_id}, {len(self.prompt_ids)} prompt tokens)"


@dataclass(frozen=True, slots=True, repr=False)
class Submission(PromptOptions):
    """One prompt that gets an answer for each of ``params``."""

    prompt_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    beyond_queue: bool = False
    """Whether to admit the requests even when the queue is full."""

    def request(self, number: int, params: SamplingParams, **own: Any) -> Request:
        """Return the request for one answer. own: fields of Request that a submission lacks."""
        options = {each.name: getattr(self, each.name) for each in fields(PromptOptions)}
        if self.constraint is not None:
            options["constraint"] = self.constraint.copy()
        return Request(number, self.prompt_ids, params, **options, **own)


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """The cached part of a prompt, and the reason why no more of it was cached."""

    cached_tokens: int
    """The number of prompt tokens whose K and V came from the cache."""
    left_at: int
    """The position of the first token after the longest cached prefix."""
    miss: MissReason | None
    """The reason why the cached prefix ends there; None if no more tokens could be shared."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before penalties and filters."""

    logprob: float
    """The log-probability of the chosen token, or of the prompt's own token."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first."""


class TokenEvent(NamedTuple):
    """A request's result of one step: a token, the end of the answer, or both."""

    request_id: int
    token_id: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    message: str | None = None
    """The reason for FinishReason.ERROR: a fixed sentence without the request's contents."""
    prefix: PrefixReport | None = None
    """Set in the event of a request's first token, and in its last event."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Set in the first event if requested: one item for each prompt token, None for token 0."""
    embedding: np.ndarray | None = None
    """Set at the end of a pooling request: float32 ``[hidden_size]`` of length 1."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits, against which the front end checks requests."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    embedding_size: int | None = None
    """The length of the vectors of a model that makes vectors instead of tokens."""
    shared_block_tokens: int | None = None
    """The number of tokens in a block, the unit of prefix sharing; None if none are shared."""
    keeps_states: bool = False
    """Whether prefixes are shared only where recurrent states are kept, near ``boundaries``."""

    def check_length(self, prompt_ids: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Raise PromptTooLongError where the prompt and one token of an answer do not fit."""
        if len(prompt_ids) > self.max_model_len - any(each.max_tokens for each in params):
            raise PromptTooLongError(len(prompt_ids), self.max_model_len)
