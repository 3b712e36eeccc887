"""The self-test of kernels on the dense backend, without an end at the first shape that fails.

    python -m tests.metal.hosted.check_kernels

Made for a virtual machine's GPU, which may refuse kernels, and have no arithmetic in bfloat16: such
a shape is listed as skipped. Exit code 1 where another shape fails, or any on a real GPU.
"""

import sys
from itertools import groupby

import mlx.core as mx

from kvcache.backends.choice import KVBackend
from kvcache.selftest.__main__ import checks_of
from kvcache.selftest.kv_backend import run_checks
from kvcache.selftest.run import Result, SelfTest
from tests.metal.hosted.device import lacks, may_refuse_kernels

REFUSAL = "RuntimeError"


def last_results() -> list[Result]:
    """Run the checks of each shape until one fails. Return the last result of each shape."""
    checks = checks_of(SelfTest.KERNELS, KVBackend.METAL_DENSE, None)
    shapes = groupby(checks, lambda check: check[0].partition(":")[0])
    return [run_checks(shape, lambda _: None)[-1] for _, shape in shapes]


def main() -> int:
    """The exit code."""
    missing = lacks("dense")
    if missing:
        print(f"SKIPPED everything: {'; '.join(missing)}")
        return 0
    mx.set_default_device(mx.Device(mx.gpu))
    virtual, wrong = may_refuse_kernels(), 0
    for last in last_results():
        refused, narrow = last.text.startswith(REFUSAL), last.name.startswith("bfloat16")
        excused = virtual and (refused or narrow)
        verdict = "good" if last.passed else "SKIPPED" if excused else "WRONG"
        print(f"{verdict} {last.name}: {last.text}")
        wrong += verdict == "WRONG"
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
