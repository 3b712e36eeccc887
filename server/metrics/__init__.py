"""The figures of /metrics."""

from server.metrics.registry import Metrics as Metrics
from server.metrics.requests import HttpMetrics as HttpMetrics
