"""Tests. The BLAS is loaded here, before any of them imports MLX."""

import metal_ext as metal_ext
