"""Compile the required format of an answer into a constraint on the engine's tokens."""
