"""Ray Serve's request router of our replicas: gives PrefixRouter what Ray knows, and Ray what that
chooses. The interface is alpha, so Ray is pinned."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.cluster.messages import Route
from server.cluster.routing import Routing


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by the hashes of a prompt's blocks, which are in the Route that is the first argument
    of every call."""

    def initialize_state(self, **options: Any) -> None:
        """Begin. options: of Routing."""
        self._routing = Routing(**options)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take in which replicas there are, and what each has reported."""
        super().update_replicas(replicas)
        self._routing.update(
            {its.replica_id.unique_id: its.routing_stats or {} for its in replicas}
        )

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen one alone, in the first rank; nothing where there is none now."""
        assert pending_request is not None
        route = pending_request.args[0]
        assert isinstance(route, Route)
        pending_request.routing_context.should_backoff = True
        name = self._routing.choose(route)
        return [[its for its in candidate_replicas if its.replica_id.unique_id == name]]
