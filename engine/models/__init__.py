"""Model forwards over flat token arrays."""
