"""Endpoints, one file per family."""
