"""The HTTP server, its text processing, and the command line."""

import os

# transformers warns without PyTorch, which quire does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
