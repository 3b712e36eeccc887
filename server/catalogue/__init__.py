"""Finds models on this disk and on the Hugging Face hub, and resolves their names."""
