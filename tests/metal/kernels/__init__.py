"""The Metal kernels' texts, run on the CPU: `make -C tests/metal kernels`.

Files are called check_*.py, so that plain pytest, which has no compiled kernels, passes them by.
"""
