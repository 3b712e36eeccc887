"""Instructions that the kernels of arm64 take for a product, counted under the emulator.

    python3 tests/native/count_instructions.py EMULATOR PROGRAM

The emulator writes a line for each instruction that it executes; what a product takes is the
difference between two of them and one. A processor's time is another thing: this shows what an
instruction set saves, and what a change costs.
"""

import subprocess
import sys

OUTPUTS, INPUTS = 64, 512
ROWS = (1, 4, 12)
# Set, bits of a weight, activations.
KERNELS = (
    ("neon", 16, "float32"),
    ("neon", 4, "float32"),
    ("neon", 8, "float32"),
    ("dotprod", 4, "float32"),
    ("dotprod", 8, "float32"),
    ("dotprod", 4, "bfloat16"),
    ("dotprod", 4, "int8"),
    ("dotprod", 8, "int8"),
)
EACH = ("-singlestep", "-d", "exec,nochain")


def main() -> None:
    """Print one row for each kernel."""
    emulator, program = sys.argv[1:]
    print(f"instructions for 16 products: {OUTPUTS} outputs, {INPUTS} inputs")
    print(f"{'set':<9}{'bits':>4}  {'activations':<12}" + "".join(f"{n:>4} rows" for n in ROWS))
    for name, bits, activations in KERNELS:
        shares = []
        for rows in ROWS:
            command = [emulator, *EACH, program, name, str(bits), activations]
            sizes = [str(OUTPUTS), str(INPUTS), str(rows)]
            once, twice = (executed([*command, *sizes, times]) for times in ("1", "2"))
            shares.append(16 * (twice - once) / (OUTPUTS * INPUTS * rows))
        row = "".join(f"{share:>9.2f}" for share in shares)
        print(f"{name:<9}{bits:>4}  {activations:<12}{row}", flush=True)


def executed(command: list[str]) -> int:
    """Return how many instructions a program executes."""
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        count = sum(line.startswith(b"Trace") for line in running.stderr)
    if running.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with code {running.returncode}")
    return count


if __name__ == "__main__":
    main()
