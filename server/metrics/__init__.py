"""What /metrics shows."""

from server.metrics.registry import HttpMetrics as HttpMetrics
from server.metrics.registry import Metrics as Metrics
