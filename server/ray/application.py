"""The application on Ray Serve: one ingress on the head, and a replica on each machine.

The environment has what Ray's processes have in theirs before this is imported.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from server.cli.cluster_folder import ClusterError
from server.ray.facts import Facts
from server.ray.fleet import ReplicaCounts
from server.ray.ingress import Ingress
from server.ray.replica import Replica, why_not_here

NAME = "quire"
NODE_ID = "ray.io/node-id"
INGRESS, REPLICA = "ingress", "replica"
ROUTER = "server.ray.router:PrefixRouter"
# Ray averages requests over the first: more than a share of what runs at once starts a replica
# after the second, and less ends one after the third, as the prefixes that it holds go with it.
LOOK_BACK_S = 15.0
BUSY_SHARE = 0.9
MORE_AFTER_S = 5.0
FEWER_AFTER_S = 300.0
HEALTH_PERIOD_S = 2.0
POLL_S = 0.1
# A replica's own limits are lower, and say no in words of their own.
MAX_ONGOING_REQUESTS = 100_000
# A model that does not start is not tried for long.
CONSTRUCTOR_TRIES = 3
READING_TIMEOUT_S = 600.0
QUIET = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be deployed."""

    model: str
    settings: Mapping[str, Any]
    """Config as JSON, without secrets."""
    settings_file: str
    """The same with secrets, on the head."""
    facts: Facts
    """What must be the same on all machines."""
    per_machine: int
    """Replicas on one machine, at most."""
    ready_timeout_s: float
    drain_s: float
    version: str
    """Which no other plan has: Ray starts replicas of other versions again, and leaves those alone
    that have the same."""
    max_request_s: float
    """For how long one that is needed no more may go on with its answers."""
    max_num_seqs: int
    """Requests that run at once on a replica."""


@contextmanager
def connected(head: str) -> Iterator[None]:
    """Be a client of the cluster. Raises ClusterError."""
    try:
        ray.init(address=head, namespace=NAME, **QUIET)
    except Exception as error:
        raise ClusterError(f"the cluster at {head} does not answer: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> dict[str, str]:
    """Return the names of the machines that are there, by what Ray calls them."""
    return {its["NodeID"]: its["NodeManagerHostname"] for its in ray.nodes() if its["Alive"]}


def unfit_machines(plan: Plan, asked: Collection[str]) -> dict[str, str]:
    """Return why some of these machines cannot have a replica, by what Ray calls them. Fetches the
    model where it is missing."""
    asking = {
        node: ray.remote(why_not_here)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(plan.model, plan.settings, plan.facts)
        for node in asked
    }
    answers = {node: ray.get(answer, timeout=READING_TIMEOUT_S) for node, answer in asking.items()}
    return {node: why for node, why in answers.items() if why}


def deploy(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> str:
    """Start what is to serve, the ingress on this machine, and return where clients come. unfit:
    machines without a replica. Raises ClusterError."""
    serve.start(proxy_location="Disabled", logging_config=_logging())
    try:
        handle = serve.run(_target(plan, counts, unfit), name=NAME, route_prefix=None)
        while not (url := handle.url.remote().result()):
            time.sleep(POLL_S)
        return str(url)
    except Exception as error:
        serve.delete(NAME)
        raise ClusterError(f"the replicas did not start: {error}") from error


def resize(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> None:
    """Have so many replicas from now on. Those that there are stay as they are, unless other
    machines are unfit: then they are started again, one after the other."""
    serve.run(_target(plan, counts, unfit), name=NAME, route_prefix=None)


def _target(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> Any:
    """Return what Ray Serve is to run."""
    head = ray.get_runtime_context().get_node_id()
    needed: dict[str, Any] = {"num_replicas": counts.most}
    if counts.least < counts.most:
        needed = {"autoscaling_config": _by_need(plan, counts)}
    not_on = {NODE_ID: f"!in({','.join(unfit)})"} if unfit else {}
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        **needed,
        max_replicas_per_node=plan.per_machine,
        ray_actor_options={"num_cpus": 0, "label_selector": not_on},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_timeout_s=plan.ready_timeout_s + HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=plan.max_request_s,
        **_common(plan),
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "label_selector": {NODE_ID: head}},
        graceful_shutdown_timeout_s=plan.drain_s,
        **_common(plan),
    )
    # Public names set no version any more, and give each run another one: then all start again.
    replica, ingress = (
        its.options(version=plan.version, _internal=True) for its in (replica, ingress)
    )
    return ingress.bind(
        replica.bind(plan.model, plan.settings, plan.facts), plan.model, plan.settings_file
    )


def _by_need(plan: Plan, counts: ReplicaCounts) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=counts.least,
        max_replicas=counts.most,
        target_ongoing_requests=BUSY_SHARE * plan.max_num_seqs,
        look_back_period_s=LOOK_BACK_S,
        upscale_delay_s=MORE_AFTER_S,
        downscale_delay_s=FEWER_AFTER_S,
    )


def _common(plan: Plan) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_constructor_retry_count": CONSTRUCTOR_TRIES,
        "health_check_period_s": HEALTH_PERIOD_S,
        "logging_config": _logging(),
    }


def _logging() -> LoggingConfig:
    return LoggingConfig(enable_access_log=False, log_level="WARNING")


def end() -> None:
    """End what serves: new requests are refused, and those that run have their time."""
    if NAME in serve.status().applications:
        serve.get_app_handle(NAME).drain.remote().result()
        serve.delete(NAME)


def status() -> dict[str, Any]:
    """Return the machines, and what serves: its state, and the state of every replica."""
    found = serve.status().applications.get(NAME)
    if found is None:
        return {"machines": sorted(machines().values()), "serving": None}
    counts = {
        name: {
            str(getattr(state, "value", state)): count
            for state, count in its.replica_states.items()
        }
        for name, its in found.deployments.items()
    }
    return {
        "machines": sorted(machines().values()),
        "serving": str(getattr(found.status, "value", found.status)),
        "message": found.message,
        "replicas": counts.get(REPLICA, {}),
    }
