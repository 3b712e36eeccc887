"""Token ids and steps: scheduling, running and sampling on the one thread that touches MLX."""
