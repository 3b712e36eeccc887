"""Text and HTTP: wire formats, chat templates, streams, and the command line."""

import os

# transformers warns at its import that there is no PyTorch, which quire does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
