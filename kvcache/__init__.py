"""Finds memory blocks for the keys and values (K and V) of sequences, and shares equal blocks."""
