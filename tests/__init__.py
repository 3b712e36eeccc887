"""Tests."""

import os
import sys
import tempfile

# No server that a test or a gate starts reads the settings of its user.
os.environ["LMSTUDIO_HOME"] = ""  # nor the models that its user has there
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), f"quire-tests-{os.getuid()}")

# The editable install's finder comes last: slipcover wraps the modules that it finds twice, and
# measures none of their branches. A checkout's modules are found without it, but for the extension.
sys.meta_path.sort(key=lambda finder: type(finder).__name__ == "ScikitBuildRedirectingFinder")
