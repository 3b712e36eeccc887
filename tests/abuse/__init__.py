"""Clients that behave badly, and what becomes of them."""
