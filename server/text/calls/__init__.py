"""Tool calls: read them from a model's text, and write them back."""
