"""How this machine would serve models, without loading one."""

from dataclasses import dataclass

from engine.models.checkpoint import CheckpointError, read_checkpoint
from kvcache.choice import SubstrateChoice
from server.catalogue.local_models import LocalModel
from server.cli.model_files import EMBEDS, make_plan
from server.config import Config, SettingError


@dataclass(frozen=True, slots=True)
class Fit:
    """What would be served, or why nothing."""

    context: int | None
    """Tokens of the longest sequence; None where it cannot be served."""
    kv_bytes_per_token: int | None
    reason: str | None
    """Why it cannot be served here, a sentence; None where it can."""


class Machine:
    """This machine, with the settings in force."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        # Made with the first model: trying a GPU takes long, and all models stand on the same.
        self._choice: SubstrateChoice | None = None

    def fit(self, model: LocalModel) -> Fit:
        """Find out how a model would be served."""
        if model.problem is not None:
            return Fit(None, None, model.problem)
        try:
            embeds = EMBEDS[self._settings.engine.task]
            checkpoint = read_checkpoint(model.folder, embeds=embeds)
            plan = make_plan(self._settings, checkpoint, choice=self._choice)
        except (CheckpointError, SettingError) as error:
            return Fit(None, None, str(error))
        self._choice = plan.substrate
        memory = plan.memory
        return Fit(memory.max_model_len, memory.layout.bytes_per_token, None)
