"""Chooses replicas by Ray's own router of prefixes, which is told of prompts and failures.

Ray's class and the hooks that are overridden here are no public interface, so Ray is pinned.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from server.ray.messages import Route

# Where a replica has so many requests more than another one, prefixes no longer decide. It is half
# of what runs at once (EngineConfig): new conversations all go to a replica that is new.
IMBALANCED = 16


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Reads the Route that is the first argument of every call."""

    def initialize_state(self, **options: Any) -> None:
        # Ray's default outlives this process, with replicas that are gone, and on any machine.
        here = ray.get_runtime_context().get_node_id()
        tree = PrefixTreeActor.options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote()
        super().initialize_state(
            imbalanced_threshold=IMBALANCED, do_eviction=True, tree_actor=tree, **options
        )

    def apply_locality_routing(
        self, pending_request: PendingRequest | None = None
    ) -> set[ReplicaID]:
        """Return the replicas that the Route allows."""
        assert pending_request is not None
        route = route_of(pending_request)
        route.replicas = tuple(sorted(its.unique_id for its in self.curr_replicas))
        # Without it Ray asks again at once where there is none.
        pending_request.routing_context.should_backoff = True
        return {its for its in self.curr_replicas if route.allows(its.unique_id)}

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return Ray's choice; all that are allowed where it has chosen others."""
        assert pending_request is not None
        route = route_of(pending_request)
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        chosen = [its for rank in ranks for its in rank]
        return [_allowed(route, chosen) or _allowed(route, candidate_replicas)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Note which replica was chosen: one that did not take the call is not chosen again."""
        route = route_of(pending_request)
        if route.replica is not None:
            route.without |= {route.replica}
        chosen = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        route.replica = chosen.replica_id.unique_id
        return chosen

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str | None:
        """Return what Ray compares; None where there is nothing."""
        return route_of(pending_request).text or None


def route_of(pending_request: PendingRequest) -> Route:
    route = pending_request.args[0]
    assert isinstance(route, Route)
    return route


def _allowed(route: Route, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    return [its for its in replicas if route.allows(its.replica_id.unique_id)]
