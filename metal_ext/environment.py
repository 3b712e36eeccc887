"""What MLX reads from the environment when its first array is made: set here and nowhere else, when
this package is imported. What the user has set wins."""

import os
import sys
from collections.abc import MutableMapping

# A Metal queue takes 32 residency sets, and 24 may be ours. MLX has one while its wired limit is 0,
# which is never raised here: whoever raises it has MLX spread its memory over sets of 5 % of the
# working set each. Sets of 20 % leave room.
RESIDENCY_VARIABLE = "MLX_RESIDENCY_SET_MAX_PCT"
RESIDENCY_PERCENT = "20"

# MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER stay as they are. Others raise them, because MLX
# commits early where a whole cache is an input of every layer. Ours never is: kernels get
# addresses, and arrays of one element stand for what is behind them.


def prepare(
    environment: MutableMapping[str, str] = os.environ, platform: str = sys.platform
) -> None:
    """Sets what is not set."""
    if platform == "darwin":
        environment.setdefault(RESIDENCY_VARIABLE, RESIDENCY_PERCENT)
