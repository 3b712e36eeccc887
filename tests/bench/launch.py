"""Starts a server for the benchmark: ``python -m tests.bench.launch NAME ...``.

Both servers go through here, so that they end with the process that started them, and mlx-lm's
proves that it multiplies with the fast BLAS.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

PRODUCTS = "products through the fast BLAS:"
NAMES = ("quire", "mlx_lm.server")
LAST_RESORT_S = 10.0


def main() -> None:
    name, *arguments = sys.argv[1:]
    # As Ctrl-C: it ends both servers in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_obey, daemon=True).start()
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


def _obey() -> NoReturn:
    """Answer each byte on standard input with the number of products so far. At the input's end the
    starter is gone: end the server."""
    while os.read(0, 1):
        os.write(1, f"\n{PRODUCTS} {fast_products()}\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_RESORT_S)
    os._exit(1)


def fast_products() -> int:
    """Return how many products of this process have gone through the fast BLAS."""
    try:
        count = ctypes.CDLL(None).bench_blas_calls
    except AttributeError:
        return 0
    count.restype = ctypes.c_uint64
    return int(count())


if __name__ == "__main__":
    main()
