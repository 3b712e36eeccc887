"""The application on Ray Serve: one ingress on the head, and a replica on each machine.

The environment has what Ray's processes have in theirs before this is imported.
"""

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
from server.ray.facts import Facts
from server.ray.fleet import ReplicaCounts
from server.ray.ingress import Ingress
from server.ray.replica import Replica, why_not_here

NAME = "quire"
NODE_ID = "ray.io/node-id"
INGRESS, REPLICA = "ingress", "replica"
ROUTER = "server.ray.router:PrefixRouter"
# Ray averages requests over LOOK_BACK_S. Above BUSY_SHARE of a replica's slots it adds a replica
# after MORE_AFTER_S. Below, it ends one after FEWER_AFTER_S: the replica's prefixes go with it.
LOOK_BACK_S = 15.0
BUSY_SHARE = 0.9
MORE_AFTER_S = 5.0
FEWER_AFTER_S = 300.0
HEALTH_PERIOD_S = 2.0
POLL_S = 0.1
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")
COMMON = {
    # A replica's own limits are lower, and say no in words of their own.
    "max_ongoing_requests": 100_000,
    # A model that does not start is not tried for long.
    "max_constructor_retry_count": 3,
    "health_check_period_s": HEALTH_PERIOD_S,
    "logging_config": LOGGING,
}
READING_TIMEOUT_S = 600.0
QUIET = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be deployed."""

    model: str
    settings: Config
    settings_file: Path
    """The settings with secrets, on the head."""
    facts: Facts
    """What must be the same on all machines."""
    per_machine: int
    """Replicas on one machine, at most."""
    version: str = field(default_factory=partial(token_hex, 8))
    """Which no other plan has: Ray starts replicas of other versions again, and leaves those alone
    that have the same."""

    @property
    def sent(self) -> tuple[str, Mapping[str, Any], Facts]:
        """Return what replicas are made from: without secrets, which are for the front alone."""
        public = self.settings.model_copy(update={"access": AccessSection()})
        return self.model, plain_settings(public), self.facts


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
    """Return the names of the machines that are there, by Ray's names of them."""
    return {its["NodeID"]: its["NodeManagerHostname"] for its in ray.nodes() if its["Alive"]}


def unfit_machines(plan: Plan, asked: Collection[str]) -> dict[str, str]:
    """Return why some of these machines cannot have a replica, by Ray's names of them. Fetches the
    model where it is missing."""

    def asking(node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(why_not_here).options(num_cpus=0, scheduling_strategy=there)
        return task.remote(*plan.sent)

    answers = ray.get([asking(node) for node in asked], timeout=READING_TIMEOUT_S)
    return {node: why for node, why in zip(asked, answers, strict=True) if why}


def deploy(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> str:
    """Start what is to serve, the ingress on this machine, and return where clients come. unfit:
    machines without a replica. Raises ClusterError."""
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
    """Have so many replicas from now on. Those that there are stay as they are, unless other
    machines are unfit: then they are started again, one after the other."""
    serve.run(_target(plan, counts, unfit), name=NAME, route_prefix=None)


def _target(plan: Plan, counts: ReplicaCounts, unfit: Collection[str]) -> Any:
    head = ray.get_runtime_context().get_node_id()
    settings = plan.settings
    needed: dict[str, Any] = {"num_replicas": counts.most}
    if counts.least < counts.most:
        busy = BUSY_SHARE * engine_config(settings).max_num_seqs
        by_need = AutoscalingConfig(
            min_replicas=counts.least,
            max_replicas=counts.most,
            target_ongoing_requests=busy,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=MORE_AFTER_S,
            downscale_delay_s=FEWER_AFTER_S,
        )
        needed = {"autoscaling_config": by_need}
    not_on = {NODE_ID: f"!in({','.join(unfit)})"} if unfit else {}
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        **needed,
        max_replicas_per_node=plan.per_machine,
        ray_actor_options={"num_cpus": 0, "label_selector": not_on},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_timeout_s=settings.server.ready_timeout_s + HEALTH_PERIOD_S,
        # One that is needed no more goes on with its answers.
        graceful_shutdown_timeout_s=settings.limits.max_request_s,
        **COMMON,
    )
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "label_selector": {NODE_ID: head}},
        graceful_shutdown_timeout_s=settings.server.drain_s,
        **COMMON,
    )
    # Public names set no version any more, and give each run another one: then all start again.
    replica, ingress = (
        its.options(version=plan.version, _internal=True) for its in (replica, ingress)
    )
    return ingress.bind(replica.bind(*plan.sent), plan.model, str(plan.settings_file))


def end() -> None:
    """End what serves: new requests are refused, and those that run have their time."""
    if NAME in serve.status().applications:
        serve.get_app_handle(NAME).drain.remote().result()
        serve.delete(NAME)


def status() -> str:
    """Say which machines there are, and what serves: its state, and the states of replicas."""
    lines = [f"machines: {', '.join(sorted(machines().values()))}"]
    found = serve.status().applications.get(NAME)
    if found is None:
        return "\n".join([*lines, "nothing is served"])
    replicas = found.deployments.get(REPLICA)
    states = {} if replicas is None else replicas.replica_states
    counts = ", ".join(f"{count} {_name(state)}" for state, count in states.items())
    lines += [f"serving: {_name(found.status)}", f"replicas: {counts or 'none'}"]
    return "\n".join([*lines, *([found.message] if found.message else [])])


def _name(state: Any) -> str:
    """Return the name of one of Ray's states, which are enumerations or words."""
    return str(getattr(state, "value", state)).lower()
