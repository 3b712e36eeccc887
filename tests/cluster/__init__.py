"""Clusters of replicas, on clocks and for real."""
