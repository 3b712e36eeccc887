"""Serves several models at one address: each has a process, and all share a memory budget."""
