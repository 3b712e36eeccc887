"""Makes one page of all metrics: the front process's, and each model's with a label ``model``."""

from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.metrics import HttpMetrics
from server.metrics.families import counters, gauge, gauges
from server.supervisor.models import ModelSupervisor
from server.supervisor.process import Headers

# Upper bound of the answers' histograms, which stay empty because the front counts no answers.
MAX_MODEL_LEN = 32768
PATH = b"/metrics"
# ``{name of a metric with one value per model: (maker, attribute of ManagedModel)}``.
OF_EACH_MODEL = {
    "quire_model_loaded_ratio": (gauges, "loaded"),
    "quire_model_users": (gauges, "users"),
    "quire_model_loads_total": (counters, "loads"),
    "quire_model_load_seconds_total": (counters, "load_seconds"),
}


class ModelsCollector(Collector):
    """Collects metrics of the models: their states, and their parts of the memory budget."""

    def __init__(self, models: ModelSupervisor) -> None:
        self._supervisor = models

    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        models = list(supervisor.models.values())
        yield gauge("quire_models_memory_budget_bytes", supervisor.budget_bytes)
        yield gauge("quire_models_memory_free_bytes", supervisor.free_bytes)
        for name, (make, attribute) in OF_EACH_MODEL.items():
            values = [((model.name,), float(getattr(model, attribute))) for model in models]
            yield make(name, ("model",), values)
        kv = [((model.name, "kv"), model.kv_bytes) for model in models]
        other = [((model.name, "other"), model.held_bytes - model.kv_bytes) for model in models]
        yield gauges("quire_model_memory_bytes", ("model", "kind"), [*kv, *other])
        ends = [((model.name, reason), n) for model in models for reason, n in model.ends.items()]
        yield counters("quire_model_ends_total", ("model", "reason"), ends)


class FrontMetrics(HttpMetrics):
    """The metrics of the front process, and a page that adds all models' metrics."""

    def __init__(self, models: ModelSupervisor, headers: Headers) -> None:
        """``headers`` are sent with the requests for the models' metrics."""
        super().__init__(MAX_MODEL_LEN)
        self._supervisor = models
        self._headers = headers
        self.registry.register(ModelsCollector(models))

    async def page(self) -> bytes:
        answers = await self._supervisor.ask_loaded(PATH, self._headers)
        merged = {family.name: family for family in self.registry.collect()}
        for model, answer in answers:
            if answer is not None and answer.status == 200:
                families = text_string_to_metric_families(answer.content.decode())
                _add(merged, model.name, families)
        return generate_latest(_Families(merged.values()))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _add(merged: dict[str, Metric], model: str, families: Iterable[Metric]) -> None:
    for family in families:
        known = merged.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        known.samples += [
            sample._replace(labels={"model": model} | sample.labels) for sample in family.samples
        ]
