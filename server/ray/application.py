"""Deploys quire on Ray Serve: an HTTP server (ingress) on the cluster's first machine (head), and
engines (replicas) on all machines. Set ``ray_process.environment`` before importing this module."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from server.cli.cluster_folder import ClusterError
from server.cli.serve_models import plain_settings
from server.config import AccessSection, Config, engine_config
from server.ray.ingress import Ingress
from server.ray.machines import ReplicaCounts
from server.ray.replica import Facts, Replica, why_not_here

NAME = "quire"
NODE_ID = "ray.io/node-id"
INGRESS, REPLICA = "ingress", "replica"
ROUTER = "server.ray.router:PrefixRouter"
# Ray adds a replica when the mean number of requests over LOOK_BACK_S has exceeded BUSY_SHARE of
# the replicas' capacity for MORE_AFTER_S. Ray ends a replica after a lower mean for FEWER_AFTER_S.
LOOK_BACK_S = 15.0
BUSY_SHARE = 0.9
MORE_AFTER_S = 5.0
FEWER_AFTER_S = 300.0
HEALTH_PERIOD_S = 2.0
POLL_S = 0.1
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")
COMMON = {
    # Larger than quire's own limits, so that clients get quire's errors, which are clearer.
    "max_ongoing_requests": 100_000,
    "max_constructor_retry_count": 3,
    "health_check_period_s": HEALTH_PERIOD_S,
    "logging_config": LOGGING,
}
READING_TIMEOUT_S = 600.0
QUIET = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}


@dataclass(frozen=True, slots=True)
class Plan:
    """The model and the settings with which replicas are deployed."""

    model: str
    settings: Config
    settings_file: Path
    """The file on the head with all settings, secrets included."""
    facts: Facts
    per_machine: int
    """Largest number of replicas on one machine."""
    version: str = field(default_factory=partial(token_hex, 8))
    """A unique text. Deploying with another version makes Ray replace all running replicas."""

    @property
    def replica_arguments(self) -> tuple[str, Mapping[str, Any], Facts]:
        """The arguments for Replica's constructor. They contain no secrets, such as API keys."""
        public = self.settings.model_copy(update={"access": AccessSection()})
        return self.model, plain_settings(public), self.facts


@contextmanager
def connected(head: str) -> Iterator[None]:
    """Keep a connection to the cluster while the context is open. Raises ClusterError."""
    try:
        ray.init(address=head, namespace=NAME, **QUIET)
    except Exception as error:
        raise ClusterError(f"the cluster at {head} does not answer: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> dict[str, str]:
    """Return ``{Ray's id: host name}`` of the machines that are in the cluster now."""
    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def unfit_machines(plan: Plan, nodes: Collection[str]) -> dict[str, str]:
    """Return ``{machine's id: why it cannot serve}``. Machines first download missing files."""
    tasks = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(why_not_here).options(num_cpus=0, scheduling_strategy=there)
        tasks.append(task.remote(*plan.replica_arguments))
    reasons = ray.get(tasks, timeout=READING_TIMEOUT_S)
    return {node: reason for node, reason in zip(nodes, reasons, strict=True) if reason}


def deploy(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> str:
    """Start replicas on all machines except ``unfit``, and the HTTP server on this machine.
    Return the HTTP server's address. Raises ClusterError."""
    serve.start(proxy_location="Disabled", logging_config=LOGGING)
    try:
        handle = serve.run(_target(plan, counts, unfit), name=NAME, route_prefix=None)
        while not (url := handle.url.remote().result()):
            time.sleep(POLL_S)
        return str(url)
    except Exception as error:
        serve.delete(NAME)
        raise ClusterError(f"the replicas did not start: {error}") from error


def resize(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> None:
    """Change the number of replicas. If ``unfit`` has changed, Ray restarts all replicas."""
    serve.run(_target(plan, counts, unfit), name=NAME, route_prefix=None)


def _target(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> Any:
    settings = plan.settings
    number: dict[str, Any] = {"num_replicas": counts.maximum}
    if counts.minimum < counts.maximum:
        scaling = AutoscalingConfig(
            min_replicas=counts.minimum,
            max_replicas=counts.maximum,
            target_ongoing_requests=BUSY_SHARE * engine_config(settings).max_num_seqs,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=MORE_AFTER_S,
            downscale_delay_s=FEWER_AFTER_S,
        )
        number = {"autoscaling_config": scaling}
    allowed = {NODE_ID: f"!in({','.join(unfit)})"} if unfit else {}
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        **number,
        max_replicas_per_node=plan.per_machine,
        ray_actor_options={"num_cpus": 0, "label_selector": allowed},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_timeout_s=settings.server.ready_timeout_s + HEALTH_PERIOD_S,
        # A replica that is no longer needed may finish its answers.
        graceful_shutdown_timeout_s=settings.limits.max_request_s,
        **COMMON,
    )
    head = ray.get_runtime_context().get_node_id()
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "label_selector": {NODE_ID: head}},
        graceful_shutdown_timeout_s=settings.server.drain_s,
        **COMMON,
    )
    # Ray no longer has ``version`` (see Plan) among its public options.
    replica, ingress = (
        each.options(version=plan.version, _internal=True) for each in (replica, ingress)
    )
    replicas = replica.bind(*plan.replica_arguments)
    return ingress.bind(replicas, plan.model, str(plan.settings_file))


def end() -> None:
    """Refuse new requests, wait for running requests, and end the application."""
    if NAME in serve.status().applications:
        serve.get_app_handle(NAME).drain.remote().result()
        serve.delete(NAME)


def status() -> str:
    """Return a text for the user: the machines, and the number of replicas in each state."""
    lines = [f"machines: {', '.join(sorted(machines().values()))}"]
    application = serve.status().applications.get(NAME)
    if application is None:
        return "\n".join([*lines, "nothing is served"])
    replicas = application.deployments.get(REPLICA)
    states = {} if replicas is None else replicas.replica_states
    counts = ", ".join(f"{count} {_name(state)}" for state, count in states.items())
    lines += [f"serving: {_name(application.status)}", f"replicas: {counts or 'none'}"]
    return "\n".join([*lines, *([application.message] if application.message else [])])


def _name(state: Any) -> str:
    """Return the name of a Ray state, which is a member of an enumeration or a text."""
    return str(getattr(state, "value", state)).lower()
