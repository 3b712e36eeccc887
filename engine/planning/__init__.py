"""Plans capacity from a ``config.json``: a model's memory, and its computed speed."""
