"""The metrics that GET /metrics exposes."""

from server.metrics.registry import Metrics as Metrics
from server.metrics.requests import HttpMetrics as HttpMetrics
