"""Runs a server the way the benchmark wants it: ``python -m tests.bench.launch NAME THREADS ...``.

Both servers go through here, so that both multiply with the same BLAS on the same number of
threads, prove that they do, and end with the process that started them.
"""

import os
import signal
import sys
import threading
import time
from typing import NoReturn

import mlx.core as mx

import metal_ext

PRODUCTS = "products through the fast BLAS:"
NAMES = ("quire", "mlx_lm.server")
LAST_RESORT_S = 10.0


def main() -> None:
    """The command."""
    name, threads, *arguments = sys.argv[1:]
    # What Ctrl-C does ends both servers in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = _prove_fast_blas(int(threads))
    threading.Thread(target=_obey, args=(before,), daemon=True).start()
    sys.argv = [name, *arguments]
    _serve(name)


def _serve(name: str) -> None:
    if name == "quire":
        from server import cli

        cli.main()
    elif name == "mlx_lm.server":
        from mlx_lm import server

        server.main()
    else:
        raise SystemExit(f"{name!r}: only {' and '.join(NAMES)} can be launched")


def _prove_fast_blas(threads: int) -> int:
    """Multiplies once; returns how many products there have been. Where MLX brings a fast BLAS
    itself, on a Mac, there is nothing to prove."""
    blas = metal_ext.fast_blas
    if blas is None:
        return 0
    blas.use(metal_ext.CpuWorkers(threads))
    before = blas.calls
    mx.eval(mx.ones((8, 64)) @ mx.ones((64, 64)))
    assert blas.calls > before, "MLX multiplies float32 with its own BLAS"
    return blas.calls


def _obey(before: int) -> NoReturn:
    """A byte on standard input asks how many products there have been since. Its end means that the
    starter is gone, and nobody needs a server."""
    while os.read(0, 1):
        calls = metal_ext.fast_blas.calls - before if metal_ext.fast_blas is not None else 0
        os.write(1, f"\n{PRODUCTS} {calls}\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_RESORT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
