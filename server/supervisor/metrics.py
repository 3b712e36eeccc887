"""The metrics of all models and of the front, on one page: a model's have its name as a label."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.metrics import HttpMetrics
from server.metrics.families import counters, gauge, gauges
from server.supervisor.errors import NoAnswerError
from server.supervisor.models import ModelSupervisor
from server.supervisor.process import Headers, ModelProcess

# Of answers, which the models' processes count. Nobody asks the front for the longest one.
MAX_MODEL_LEN = 32768
PATH = b"/metrics"


class ModelsCollector(Collector):
    """Collect which models are loaded, and what they have of the budget."""

    def __init__(self, models: ModelSupervisor) -> None:
        self._supervisor = models

    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        models = list(supervisor.models.values())
        yield gauge(
            "quire_models_memory_budget_bytes",
            "Memory that all models together may have",
            supervisor.budget_bytes,
        )
        yield gauge(
            "quire_models_memory_free_bytes",
            "Memory of the budget that no model has",
            supervisor.free_bytes,
        )
        yield gauges(
            "quire_model_loaded_ratio",
            "1 while the model is loaded, else 0",
            ("model",),
            [((model.name,), float(model.loaded)) for model in models],
        )
        yield gauges(
            "quire_model_memory_bytes",
            "What a model has of the budget: K and V at most, and all else",
            ("model", "kind"),
            [
                ((model.name, kind), amount)
                for model in models
                for kind, amount in (
                    ("kv", model.kv_bytes),
                    ("other", model.held_bytes - model.kv_bytes),
                )
            ],
        )
        yield gauges(
            "quire_model_users",
            "Requests that a model answers or that wait for it",
            ("model",),
            [((model.name,), model.users) for model in models],
        )
        yield counters(
            "quire_model_loads",
            "Times that a model was loaded",
            ("model",),
            [((model.name,), model.loads) for model in models],
        )
        yield counters(
            "quire_model_load_seconds",
            "Seconds that all loads of a model have taken together",
            ("model",),
            [((model.name,), model.load_seconds) for model in models],
        )
        yield counters(
            "quire_model_ends",
            "Times that a model's process ended: nobody wanted it any more (keep_alive), another "
            "model needed its memory (room), it failed, or somebody asked for it (stopped)",
            ("model", "reason"),
            [((its.name, reason), count) for its in models for reason, count in its.ends.items()],
        )


class FrontMetrics(HttpMetrics):
    """The registry of the front."""

    def __init__(self, models: ModelSupervisor) -> None:
        super().__init__(MAX_MODEL_LEN)
        self._supervisor = models
        self.registry.register(ModelsCollector(models))

    async def render_all(self, headers: Headers) -> bytes:
        """Write the front's metrics and those of all loaded models. headers: to ask these with."""
        loaded = [(its.name, its.process) for its in self._supervisor.loaded if its.process]
        pages = await asyncio.gather(*(_page(process, headers) for _, process in loaded))
        merged: dict[str, Metric] = {}
        for family in self.registry.collect():
            merged[family.name] = family
        for (name, _), page in zip(loaded, pages, strict=True):
            _add(merged, name, text_string_to_metric_families(page))
        registry = CollectorRegistry()
        registry.register(_Collected(merged.values()))
        return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _page(process: ModelProcess, headers: Headers) -> str:
    """Return what a process shows; nothing where it does not answer."""
    with suppress(NoAnswerError):
        answer = await process.get(PATH, headers)
        return answer.content.decode() if answer.status == 200 else ""
    return ""


def _add(merged: dict[str, Metric], model: str, families: Iterable[Metric]) -> None:
    for family in families:
        known = merged.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        known.samples += [
            sample._replace(labels={"model": model} | sample.labels) for sample in family.samples
        ]
