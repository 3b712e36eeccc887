"""Tests."""

import os
import tempfile

# No server that a test or a gate starts has the settings of whoever runs it.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), f"quire-tests-{os.getuid()}")
