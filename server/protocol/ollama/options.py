"""``options``: how an answer is sampled, in Ollama's names -> those of all APIs."""

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from server.config import LimitsSection
from server.protocol.common import MAX_SEED, MAX_TOP_K, ListOf, SamplingFields, WireModel
from server.protocol.fields import FieldRule, refuse_unsupported
from server.protocol.ollama.fields import OPTION_FIELDS
from server.protocol.wire_errors import invalid

LENGTH_PARAM = "options.num_predict"
# Ollama's default, which stands for one that is drawn.
RANDOM_SEED = -1
WHOLE_ANSWER = -1

Penalty = Annotated[float, Field(ge=-2, le=2)]


class OllamaSampling(SamplingFields):
    """The sampling fields of a request of Ollama's."""

    stop_param: ClassVar[str] = "options.stop"

    stop: tuple[str, ...] = ()

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return self.stop


class Options(WireModel):
    """How an answer is sampled; server/protocol/ollama/fields.py says what becomes of each."""

    model_config = ConfigDict(extra="allow")
    rules: ClassVar[tuple[FieldRule, ...]] = OPTION_FIELDS

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: int | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: str | ListOf[str] | None = None
    num_predict: int | None = Field(default=None, ge=-2, le=2**31 - 1)

    def check(self, limits: LimitsSection) -> None:
        """Check what the types cannot. Raises ApiError that names the option."""
        refuse_unsupported(self.rules, self.model_extra or {})
        if self._has_penalty and self.repeat_last_n not in (None, WHOLE_ANSWER):
            raise invalid(
                f"repeat_last_n is {self.repeat_last_n}; penalties count all tokens here: leave it "
                "out, or send -1.",
                "repeat_last_n",
            )
        self.sampling.check(limits)

    @property
    def sampling(self) -> OllamaSampling:
        """The same in the names of all APIs."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return OllamaSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == RANDOM_SEED else self.seed,
            stop=stop,
        )

    @property
    def max_tokens(self) -> int | None:
        """The longest answer that is wanted; None: as long as fits."""
        wanted = self.num_predict or 0
        return wanted if wanted > 0 else None

    @property
    def _has_penalty(self) -> bool:
        repeats = self.repeat_penalty not in (None, 1)
        return repeats or bool(self.presence_penalty or self.frequency_penalty)
