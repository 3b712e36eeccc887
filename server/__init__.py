"""The HTTP server, its text processing, and the command line."""

import os

# Without this variable, transformers warns that PyTorch is missing, which quire does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
