"""Text <-> token ids: tokenizers, chat templates, and parsers of answers."""
