"""Text and HTTP: wire formats, chat templates, streams, and the command line."""
