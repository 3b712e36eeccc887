"""The table of server/metrics/README.md: ``python -m tests.server.metrics.table`` writes it."""

from pathlib import Path

import metal_ext  # noqa: F401  # before anything that imports MLX
from engine.client import EngineClient
from server.config import ModelsSection
from server.metrics import Metrics
from server.ray.membership import Membership, ReplicasCollector
from server.supervisor.metrics import ModelsCollector
from server.supervisor.models import ModelSupervisor
from tests.engines import recall_loop

DOCUMENT = Path(__file__).parents[3] / "server" / "metrics" / "README.md"
UNITS = ("seconds", "bytes", "tokens", "blocks", "ratio")


def families(client: EngineClient) -> list[tuple[str, str, str, str]]:
    """Name, type, unit and help text of all, by name."""
    found = []
    several = ModelsCollector(ModelSupervisor(ModelsSection(), 0))
    replicas = ReplicasCollector(Membership(1.0, lambda: 0.0))
    shown = (*Metrics(client).registry.collect(), *several.collect(), *replicas.collect())
    for family in shown:
        name = family.name + ("_total" if family.type == "counter" else "")
        parts = family.name.split("_")
        unit = next((unit for unit in UNITS if unit in parts[-2:]), "")
        found.append((name, family.type, unit, family.documentation))
    return sorted(found)


def table(client: EngineClient) -> str:
    """As it stands in the document."""
    rows = [
        f"{name} | {text}" + (" (histogram)" if kind == "histogram" else "")
        for name, kind, _, text in families(client)
        if not name.startswith("process_")
    ]
    return "\n".join(["name | meaning", "---|---", *rows])


def main() -> None:
    """Writes the table into the document."""
    client = EngineClient(recall_loop, max_queue=1, max_backlog=1)
    client.start()
    try:
        before = DOCUMENT.read_text().partition("name | meaning")[0]
        DOCUMENT.write_text(f"{before}{table(client)}\n")
    finally:
        client.stop(10)


if __name__ == "__main__":
    main()
