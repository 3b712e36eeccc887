"""Compile the required form of an answer into a constraint for the engine."""
