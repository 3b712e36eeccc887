"""How fast quire is, beside other software on the same machine: ``python -m tests.bench``."""

import metal_ext as metal_ext  # before any module here imports MLX: it loads the BLAS
