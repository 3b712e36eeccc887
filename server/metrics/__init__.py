"""What /metrics shows."""

from server.metrics.registry import Metrics as Metrics
