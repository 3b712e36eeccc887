"""How this machine would serve models, without loading one."""

from dataclasses import dataclass

from engine.build import EnginePlan
from engine.models.checkpoint import Checkpoint
from kvcache.choice import SubstrateChoice
from server.catalogue.local_models import LocalModel
from server.cli.model_files import make_plan
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

    def __init__(self, settings: Config, budget_bytes: int | None = None) -> None:
        """budget_bytes: what a model may use in all; None: what the machine has left."""
        self.settings = settings
        self.budget_bytes = budget_bytes
        # Made with the first model: trying a GPU takes long, and all models stand on the same.
        self._choice: SubstrateChoice | None = None

    def plan(self, checkpoint: Checkpoint) -> EnginePlan:
        """Fit a model and its cache into the memory. Raises SettingError with the figure that does
        not fit."""
        plan = make_plan(self.settings, checkpoint, self.budget_bytes, self._choice)
        self._choice = plan.substrate
        return plan

    def fit(self, model: LocalModel) -> Fit:
        """Find out how a model would be served."""
        if model.checkpoint is None:
            return Fit(None, None, model.problem)
        try:
            memory = self.plan(model.checkpoint).memory
        except SettingError as error:
            return Fit(None, None, str(error))
        return Fit(memory.max_model_len, memory.layout.bytes_per_token, None)
