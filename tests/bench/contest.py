"""Who takes part in a comparison of servers: quire, mlx-lm's server, and whoever is named."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.bench.peers import Contestant, Remote, Server
from tests.bench.programs import Command, Program

OURS = "quire"


@dataclass(frozen=True, slots=True)
class Contest:
    """As it was asked for."""

    threads: int
    seeds: Iterator[int]
    """Of prompts: no two loads of a run have one, not even on servers that outlive the run."""
    ours_url: str | None = None
    """Of a quire that runs already; otherwise the benchmark starts one."""
    peers: tuple[tuple[str, str], ...] = ()
    """Names and URLs of servers that run already."""
    commands: tuple[Command, ...] = ()
    with_mlx_lm: bool = True

    @contextmanager
    def servers(
        self, ours: Program, mlx_lm: Program | None, others: Sequence[Program] = ()
    ) -> Iterator[list[Contestant]]:
        """All of them at once, ours first. What was started here ends here. others: more of our
        own, which have nothing to do where ours is at a URL."""
        with ExitStack() as stack:

            def start(program: Program | Command) -> Contestant:
                return stack.enter_context(Server(program, self.threads))

            own = Remote.at(OURS, self.ours_url) if self.ours_url is not None else start(ours)
            result: list[Contestant] = [own]
            if mlx_lm is not None and self.with_mlx_lm:
                result.append(start(mlx_lm))
            result += [start(command) for command in self.commands]
            result += [Remote.at(label, url) for label, url in self.peers]
            if self.ours_url is None:
                result += [start(program) for program in others]
            yield result
