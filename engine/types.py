"""Types that the engine and its callers share. No type here needs MLX or text."""

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from engine.figures import Distributions as Distributions
from engine.figures import Drafting as Drafting
from engine.figures import EngineStats as EngineStats
from engine.figures import Histogram as Histogram
from engine.figures import HistogramCounts as HistogramCounts
from engine.figures import MlxMemory as MlxMemory
from kvcache.block_hashes import BlockHashes as BlockHashes
from kvcache.block_hashes import PrefixSalt as PrefixSalt
from kvcache.sequences import NO_BOUNDARIES as NO_BOUNDARIES
from kvcache.sequences import PromptBoundaries as PromptBoundaries
from kvcache.stats import KVStats as KVStats
from kvcache.stats import MissReason as MissReason
from kvcache.stats import SlotStats as SlotStats

FORM_LIMITS = "the answer's form has come to its limits"
"""If a FormLimitError has ended a request, the request's error message begins with this text."""


class QueueFullError(Exception):
    """The engine's queue has no room for the submitted requests."""


class ShareFullError(QueueFullError):
    """A tenant (user of an API key) would have more requests in the engine than it may have."""


class PromptTooLongError(Exception):
    """The prompt is longer than the model's context."""

    def __init__(self, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(f"{prompt_tokens} prompt tokens, {max_model_len} at most")
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class FormLimitError(Exception):
    """The grammar of an answer has hit a limit; the message is safe to show to clients."""


class EngineDeadError(Exception):
    """The engine has ended and answers no more requests."""


class EngineStuckError(Exception):
    """The engine's thread hangs in a step."""


class EngineFailedError(RuntimeError):
    """Two steps failed within a short time, or the device is lost."""


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
    """With temperature 0, the likeliest token is always chosen."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of likeliest tokens to choose from; 0 allows all tokens."""
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
    """The length of an answer below which no stop token is chosen, unless the grammar forces it."""
    prompt_logprobs: int | None = None
    """The number of alternatives to report with each prompt token. If set, max_tokens may be 0."""

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
    """The grammar of one answer, of which ``deepcopy`` makes one for another answer, or for drafts.
    After the request is submitted, only the engine calls these methods. An exception that a method
    raises ends only this request."""

    def fill_mask(self, row: np.ndarray) -> bool:
        """Write the mask of the tokens that may come next to ``row``, a uint32 array with one bit
        per token. Bit ``i % 32`` of word ``i // 32`` becomes 1 if token i may come next. After a
        complete answer only stop tokens may come next. Return False if every token may come next.
        """

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a generated token. The engine passes stop tokens, too."""


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """A prompt, and the parameters of each answer to it. All answers share the prompt's K and V."""

    prompt_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    _: KW_ONLY
    request_id: int = 0
    """The id of the first answer; the next ids are those of the other answers. EngineClient sets
    it."""
    submitted_s: float | None = None
    """The time of submission by the engine's clock; None leaves the request out of statistics."""
    priority: int = 0
    """Requests with lower values run earlier."""
    salt: PrefixSalt = NO_SALT
    """Only requests with equal salts share prefixes."""
    boundaries: PromptBoundaries = NO_BOUNDARIES
    """Positions where other prompts may begin to differ from this prompt."""
    constraint: TokenConstraint | None = None
    """The grammar of the first answer; each other answer gets a copy."""
    prediction_ids: tuple[int, ...] = ()
    """Tokens that the client expects in the answers, from which drafts are taken."""
    pooling: bool = False
    """Whether the result is the prompt's embedding vector. ``max_tokens`` is 0 in this case."""
    beyond_queue: bool = False
    """Whether to admit the request even when the queue is full."""
    name: str = "unnamed"

    @property
    def answer_ids(self) -> range:
        return range(self.request_id, self.request_id + len(self.params))

    def __repr__(self) -> str:
        """Return counts only: prompts are never printed."""
        return f"Request({self.request_id}, {len(self.prompt_ids)} prompt tokens)"


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """The cached part of a prompt, and the reason why no more of it was cached."""

    cached_tokens: int
    """The number of prompt tokens whose K and V came from the cache."""
    left_at: int
    """The position of the first prompt token after the longest cached prefix."""
    miss: MissReason | None
    """The reason why the cache had no more of the prompt's tokens; None if none were missing."""


class DraftReport(NamedTuple):
    """The number of an answer's drafts that were kept, and that were rejected: those of a
    prediction or of what was said, not those of the model's head."""

    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the tokens at one position, without penalties and filters."""

    logprob: float
    """The log-probability of the chosen token, or of the prompt's own token."""
    top: tuple[tuple[int, float], ...]
    """The ids and log-probabilities of the likeliest tokens, best first."""


class TokenEvent(NamedTuple):
    """An answer's result of one step: a token, the end of the answer, or both."""

    request_id: int
    """The answer's id, one of the ``answer_ids`` of its request."""
    token_id: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    message: str | None = None
    """The reason for FinishReason.ERROR: a fixed sentence without the request's contents."""
    prefix: PrefixReport | None = None
    """Set in the event of a request's first token, and in its last event."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Set in the first event if requested: one item for each prompt token, None for token 0."""
    drafts: DraftReport | None = None
    """The answer's drafts so far, or None without any."""
    embedding: np.ndarray | None = None
    """The prompt's vector, float32 ``[hidden_size]``, in the last event of a pooling request."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits, against which a server checks each request."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    embedding_size: int | None = None
    """The number of values in a prompt's vector; None for a model that generates tokens."""
    shared_block_tokens: int | None = None
    """The number of tokens in a block, the unit of prefix sharing; None if nothing is shared."""
    keeps_states: bool = False
    """Whether the model has recurrent states. A shared prefix must then end at a kept state."""

    def kept_tokens(self, prompt_tokens: int) -> int:
        """Return how many prompt tokens the prefix cache keeps. It keeps whole blocks only."""
        block = self.shared_block_tokens
        return prompt_tokens // block * block if block else 0

    def check_length(self, request: Request) -> None:
        """Raise PromptTooLongError if the prompt and one answer token exceed ``max_model_len``."""
        tokens = len(request.prompt_ids)
        if tokens > self.max_model_len - any(each.max_tokens for each in request.params):
            raise PromptTooLongError(tokens, self.max_model_len)
