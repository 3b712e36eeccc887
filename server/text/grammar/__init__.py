"""Compiles the format that a request requires of its answer into a constraint on tokens."""
