"""Chooses the replica of a request, and takes in what replicas report: PrefixRouter on the thread
of a handle."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.cluster.messages import Route
from server.cluster.prefix_router import PrefixRouter
from server.cluster.replica_loads import Load

# Of 300 bytes each.
MAX_HASHES = 200_000
SAMPLE_S = 0.02
# A wait that few mind. What a conversation left behind on its replica would be computed again,
# while others wait for that.
PATIENCE_S = 0.5
# Tokens of prompts per second, as long as none is known: a small model on a small machine.
FIRST_SPEED = 2000.0


class Routing:
    """Which replica gets a request. It belongs to the event loop on which it was made."""

    def __init__(
        self, max_hashes: int = MAX_HASHES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """max_hashes: how many are remembered. clock: seconds."""
        self._clock = clock
        self._sampled = -math.inf
        self._loop = asyncio.get_running_loop()
        self._max_hashes = max_hashes
        self._router: PrefixRouter | None = None
        """None until a request says how many tokens a block has."""
        self._reports: Mapping[str, Mapping[str, Any]] = {}
        self._names: tuple[str, ...] = ()
        self._taken: dict[str, int] = {}
        """The number behind the last evicted hash that each has reported."""

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in which replicas there are. reports: of each, as EngineReplica makes them; or
        nothing."""
        self._reports = reports
        self._names = tuple(sorted(reports))
        self._taken = {name: at for name, at in self._taken.items() if name in reports}
        if self._router is not None:
            self._take_in(self._router)

    def _take_in(self, router: PrefixRouter) -> None:
        """Tell the router who there is, and what each has reported."""
        router.set_replicas(self._names)
        for name, load in self._loads().items():
            router.report_load(name, load)
        for name, report in self._reports.items():
            if (states := report.get("states")) is not None:
                router.report_states(name, *states)
            pairs: Sequence[tuple[int, bytes]] = report.get("evicted", ())
            since = self._taken.get(name, 0)
            if new := [digest for number, digest in pairs if number >= since]:
                self._taken[name] = pairs[-1][0] + 1
                router.report_evicted(name, new)

    def _loads(self) -> dict[str, Load]:
        """Return what replicas have reported, without requests: all go through here, and are known
        better than by a late report."""
        found = {
            name: load
            for name, report in self._reports.items()
            if isinstance(load := report.get("load"), Load)
        }
        return {
            name: replace(load, waiting=0, running=0)
            for name, load in with_all_speeds(found).items()
        }

    def choose(self, route: Route) -> str | None:
        """Return the replica of a request; None where there is none now. One that was chosen for
        it before and did not take it is not chosen again."""
        route.replicas = self._names
        if route.target is not None:
            return route.target if route.target in self._names else None
        if route.replica is not None:
            route.finished()
            route.without |= {route.replica}
        if self._router is None:
            self._router = PrefixRouter(
                max_hashes=self._max_hashes,
                block_tokens=route.block_tokens,
                patience_s=PATIENCE_S,
                keeps_states=route.ends is not None,
            )
            self._take_in(self._router)
        if (now := self._clock()) - self._sampled >= SAMPLE_S:
            # How busy replicas are is seen here, between their reports.
            self._sampled = now
            for name, load in self._loads().items():
                self._router.report_load(name, load)
        choice = self._router.choose(route.hashes, route.tokens, without=route.without)
        if choice is None:
            return None
        route.replica, route.reason = choice.replica, choice.reason.value
        if route.tokens:
            self._send(self._router, route, choice.replica)
        return choice.replica

    def _send(self, router: PrefixRouter, route: Route, name: str) -> None:
        """Count the request until it is finished: who asks says so from another thread."""
        flight = router.sent(name, route.hashes, route.tokens, route.ends or ())

        def started() -> None:
            self._loop.call_soon_threadsafe(router.started, flight)

        def finished(hashes: Sequence[bytes]) -> None:
            self._loop.call_soon_threadsafe(router.finished, flight, hashes)

        route.on_started, route.on_finished = started, finished


def with_all_speeds(loads: Mapping[str, Load]) -> dict[str, Load]:
    """Return the loads of replicas, where one whose speed is not known is taken for as fast as the
    fastest: so it gets requests, and is known soon."""
    fastest = max((load.speed for load in loads.values()), default=0.0) or FIRST_SPEED
    return {name: replace(load, speed=load.speed or fastest) for name, load in loads.items()}
