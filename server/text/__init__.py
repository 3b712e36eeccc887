"""Convert between text and token ids: tokenizers, chat templates, and parsers of answers."""
