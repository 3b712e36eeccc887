"""Text and HTTP: wire formats, chat templates, streams, and the command line."""

import os

# transformers says when it is imported that it has no PyTorch, for which quire has no use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
