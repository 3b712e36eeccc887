"""Self-tests of a kind of device memory, each in its own process, which may crash or hang."""
