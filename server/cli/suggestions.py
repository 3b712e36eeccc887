"""Names models that fit a machine, and how fast they would be, without a question to the hub:
configs/aliases.toml has the sizes of the models that quire suggests."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.planning.estimate import Estimate
from kvcache.budget import gib
from server.cli.models import Machine
from server.cli.plan import LONG_PROMPT, SHORT_CONTEXT, Target, rate, read_estimate
from server.cli.sentences import table
from server.cli.settings import read_settings
from server.config import Config, SettingError
from server.shipped import ALIASES_FILE, shipped

SUGGESTIONS = 5
# A slower model, or one with less context than LONG_PROMPT, is not suggested.
SLOWEST_TOKENS_PER_S = 5.0
HEAD = ("model", "weights", "context", "tokens/s", "first token")


def configs() -> dict[str, dict[str, Any]]:
    """Return the fields of config.json of each model that quire suggests, by short name."""
    tables = tomllib.loads(shipped(ALIASES_FILE).read_text(encoding="utf-8"))
    fields, columns = tables["fields"], tables["columns"]
    return {
        name: fields["all"]
        | fields[row[0].removesuffix("_moe")]
        | fields.get(name, {})
        | dict(zip(columns, row, strict=True))
        for name, row in tables["suggested"].items()
    }


def estimates(settings: Config, target: Target) -> Iterator[tuple[str, Estimate]]:
    """Yield the estimate of each model that fits, in the order of configs/aliases.toml."""
    machine = Machine(settings)
    for name, config in configs().items():
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            try:
                yield name, read_estimate(machine, target, Path(folder))
            except SettingError:
                continue


def suggest(file: Path | None, *, memory: str | None = None, device: str | None = None) -> str:
    """Return a table of the largest models that fit a machine. memory, device: as for
    ``plan_model``. Raises StartError."""
    target = Target.of(device, memory)
    rows: list[tuple[str, ...]] = []
    for name, model in estimates(read_settings(file, {}), target):
        plan = model.plan.memory
        per_s = model.decode_tokens_per_s(SHORT_CONTEXT)
        good = per_s >= SLOWEST_TOKENS_PER_S and plan.max_model_len >= LONG_PROMPT
        if good and len(rows) < SUGGESTIONS:
            cells = gib(plan.demand.weights_bytes), str(plan.max_model_len), rate(per_s)
            rows.append((name, *cells, f"{rate(model.first_token_s(LONG_PROMPT))} s"))
    if not rows:
        return f"No model that quire suggests fits {target}: `quire run demo` needs almost nothing."
    return "\n".join(
        [
            f"Models that fit {target}, largest first. Computed, not measured: tokens/s of",
            "one chat at 1k tokens of context, and the first token of a 4k prompt.",
            "",
            *table(HEAD, rows),
            "",
            f"`quire pull {rows[0][0]}` fetches one, `quire run {rows[0][0]}` also chats with it.",
        ]
    )
