"""Thousands of small worlds around the production scheduler, cache and loop: see simulator.py."""
