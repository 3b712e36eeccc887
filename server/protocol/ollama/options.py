"""``options``: how an answer is sampled, in Ollama's names -> those of all APIs."""

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from server.config import LimitsSection
from server.protocol.common import ListOf, SamplingFields, Seed, TopK, Whole, WireModel
from server.protocol.fields import FieldRule, refuse_unsupported
from server.protocol.ollama.fields import OPTION_FIELDS

LENGTH_PARAM = "options.num_predict"

Penalty = Annotated[float, Field(ge=-2, le=2)]


class OllamaSampling(SamplingFields):
    """The sampling fields of a request of Ollama's."""

    stop_param: ClassVar[str] = "options.stop"
    bounds_stops: ClassVar[bool] = False

    stop: tuple[str, ...] = ()

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
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
