"""The replicas as people see them, from what each has said last."""

from server.cluster.membership import Membership
from server.cluster.messages import ReplicaReport
from server.metrics.replica_figures import ReplicaFigures


def listed(members: Membership) -> list[ReplicaFigures]:
    """Return the figures of all replicas that there are, by their names."""
    alive = {report.name for report in members.alive}
    said = {report.name: report for report in members.reports}
    return [
        _figures(said[name], members.age_s(name), is_up=name in alive)
        if name in said
        else ReplicaFigures(name, None, "starting", None)
        for name in sorted(members.names)
    ]


def _figures(report: ReplicaReport, age_s: float, *, is_up: bool) -> ReplicaFigures:
    stats = report.stats
    free = cached = total = 0
    if (kv := stats.kv) is not None:
        sizes = (kv.free_bytes, kv.cached_bytes, kv.capacity_bytes)
        free, cached, total = (size // kv.block_bytes for size in sizes)
    return ReplicaFigures(
        report.name,
        report.host,
        "up" if is_up else "silent",
        round(age_s, 3),
        stats.running,
        stats.waiting,
        report.capacity,
        free,
        cached,
        total,
        stats.submitted_prompt_tokens,
        stats.cached_prompt_tokens,
        stats.generated_tokens,
    )
