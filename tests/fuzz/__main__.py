"""Bodies of doubling sizes for a server of its own, which is watched from outside.

Without ``--minutes`` a fixed sample of the families is sent; with them as many as there is time
for, and then random mixtures. Ends with 1 where something was found. A finding is printed with its
family and size, which ``--replay`` sends again. A model that makes vectors has no streams: ``--set
engine.task=embed --streams 0 --only /v1/embeddings``.
"""

import argparse
import ast
import signal
import sys
from functools import partial
from itertools import count
from math import inf
from pathlib import Path

from tests.abuse.soak import DEMO
from tests.clients.servers import QUIRE
from tests.fuzz.bodies import families, in_order, mixture
from tests.fuzz.crowd import SETTINGS as CROWDED
from tests.fuzz.crowd import compare
from tests.fuzz.hunt import ALLOCATOR, SETTINGS, Hunt
from tests.fuzz.target import Target

SAMPLE = 60
"""Families of a run without ``--minutes``: about a minute, where nothing is found."""


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Bodies of doubling sizes, and a watch.")
    parser.add_argument("--minutes", type=float, help="instead of a fixed sample")
    parser.add_argument("--systematic", action="store_true", help="all families, then --minutes")
    parser.add_argument("--crowd", type=int, help="so many bodies of any family at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quire", type=Path, default=Path(QUIRE), help="the command")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--set", action="append", default=[], help="a setting of the server")
    parser.add_argument("--streams", type=int, default=1, help="honest ones, all the time")
    parser.add_argument("--only", default="", help="families with that in their names")
    parser.add_argument("--replay", metavar="FAMILY:N", help="send one body again")
    parser.add_argument("--save", type=Path, help="a folder for bodies that found something")
    return parser.parse_args()


def main() -> int:
    """1 where something was found."""
    asked = options()
    command = ("env", *ALLOCATOR, asked.quire)
    target = Target(command, asked.model, (*SETTINGS, *asked.set), asked.streams)
    hunt = Hunt(target, asked.save)
    signal.signal(signal.SIGTERM, hunt.end)
    try:
        openapi = hunt.target.openapi()
        known = {family.name: family for family in families(openapi) if asked.only in family.name}
        if asked.crowd:
            hunt.target.close()
            start = partial(Target, [asked.quire], asked.model, (*CROWDED, *asked.set))
            return compare(start, [*known.values()], asked.crowd, asked.seed)
        if asked.replay:
            name, _, n = asked.replay.rpartition(":")
            name = ast.literal_eval(name) if name[0] in "'\"" else name
            family = known.get(name) or mixture(openapi, int(name.split()[1]))
            print(hunt.target.calm, *hunt.send(family, family.data(int(n)), look=True), sep="\n")
            return 0
        ordered = in_order([*known.values()], asked.seed)
        if asked.minutes is None and not asked.systematic:
            hunt.run(ordered[:SAMPLE], inf)
        else:
            limit_s = 60 * (asked.minutes or 0.0)
            hunt.run(ordered, inf if asked.systematic else limit_s)
            print(f"{hunt.seconds:7.0f} s  {hunt.tried} of {len(ordered)} families", flush=True)
            numbers = count(asked.seed * 10**6)
            limit_s += hunt.seconds if asked.systematic else 0.0
            hunt.run((mixture(openapi, number) for number in numbers), limit_s)
    finally:
        hunt.target.close()
    print(hunt.table())
    return 1 if hunt.findings else 0


if __name__ == "__main__":
    sys.exit(main())
