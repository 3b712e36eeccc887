"""A server with very few file descriptors: ``python -m tests.abuse.exhaustion`` writes its port,
and serves until it is killed."""

import asyncio
import os
import resource
import sys
import tempfile
from pathlib import Path

from server.text.tokenizer import Tokenizer
from tests.abuse.servers import abused
from tests.engines import VOCAB
from tests.models import write_tokenizer

FEW = 12
"""Connections that it can have."""


async def serve() -> None:
    """Until it is killed."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB)
        async with abused(Tokenizer(Path(folder)), {"limits": {"max_receive_s": 30}}) as server:
            used = len(os.listdir("/proc/self/fd"))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + FEW, hard))
            sys.stdout.write(f"{server.port}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
