"""Keeps copies of blocks and states on an SSD: files, keys and bytes, and nothing of tokens."""
