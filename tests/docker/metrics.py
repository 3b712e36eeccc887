"""The series that quire shows, by name."""

from dataclasses import fields
from types import SimpleNamespace
from typing import cast

from engine.client import EngineClient
from engine.types import EngineStats, KVStats
from server.metrics import Metrics
from server.ray.metrics import ClusterCollector
from server.ray.remote_engine import RayReplicas, RemoteEngine

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def all_series() -> set[str]:
    """Names as expressions have them, of an engine that has a pool and has done nothing, and of a
    cluster's front."""
    figures = {field.name: 0 for field in fields(KVStats) if field.name != "cells"}
    stats = EngineStats(kv=KVStats(**figures))  # type: ignore[arg-type]
    client = SimpleNamespace(stats=stats, alive=True, step_age_s=0.0, pressure=0)
    replicas = ClusterCollector(RemoteEngine(cast(RayReplicas, None), max_backlog=1))
    families = [*Metrics(cast(EngineClient, client)).registry.collect(), *replicas.collect()]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
