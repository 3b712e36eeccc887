"""Ray Serve's autoscaling policy of our replicas: gives ``wanted_replicas`` what they have said."""

from typing import Any

from server.cluster.scaling import needs, wanted_replicas


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas there should be, and nothing to remember. context: an
    AutoscalingContext. Ray keeps to the bounds, and waits until a wish has lasted."""
    there_are = context.target_num_replicas
    if context.current_num_replicas != there_are:
        return there_are, {}
    return wanted_replicas(needs(context.aggregated_metrics or {}), there_are), {}
