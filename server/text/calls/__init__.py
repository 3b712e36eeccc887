"""Calls of tools: what a model writes -> calls, and back."""
