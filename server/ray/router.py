"""Routes a prompt to the replica that had prompts with the same prefix. Subclasses Ray's router.

Ray's class and the overridden methods are not public, and so quire pins Ray's version."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve.request_router import ReplicaID, RunningReplica
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from server.ray.replica_calls import Route

# If one replica has this many more requests than another, the replica with fewer gets the prompt,
# whatever the prefix. The number is half of EngineConfig.max_num_seqs.
IMBALANCED = 16


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Chooses replicas for calls. A call's first argument, a Route, limits the choice."""

    def initialize_state(self, **options: Any) -> None:
        # Replace Ray's own tree of prefixes, which may be on any machine and keeps ended replicas.
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

    def apply_locality_routing(self, pending_request: Any = None) -> set[ReplicaID]:
        """Return the replicas that the call's Route allows."""
        route = route_of(pending_request)
        route.replicas = tuple(sorted(each.unique_id for each in self.curr_replicas))
        # Without this flag, Ray tries again without a pause while no replica is allowed.
        pending_request.routing_context.should_backoff = True
        return {each for each in self.curr_replicas if route.allows(each.unique_id)}

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: Any = None
    ) -> list[list[RunningReplica]]:
        """Return the allowed replicas of Ray's choice, or all allowed ones if that leaves none."""
        route = route_of(pending_request)
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        chosen = [replica for rank in ranks for replica in rank]
        return [_allowed(route, chosen) or _allowed(route, candidate_replicas)]

    async def _choose_replica_for_request(
        self, pending_request: Any, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose a replica, and store its name in the Route, so that a retry takes another one."""
        route = route_of(pending_request)
        if route.replica is not None:
            route.without |= {route.replica}
        chosen = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        route.replica = chosen.replica_id.unique_id
        return chosen

    def _extract_text_from_request(self, pending_request: Any) -> str | None:
        """Return the prompt's text for Ray's prefix comparison, or None if no block is full."""
        return route_of(pending_request).text or None


def route_of(pending_request: Any) -> Route:
    route = pending_request.args[0]
    assert isinstance(route, Route)
    return route


def _allowed(route: Route, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    return [each for each in replicas if route.allows(each.replica_id.unique_id)]
