"""Plans capacity from a ``config.json``: a model's memory, and its speed in a simulated engine."""
