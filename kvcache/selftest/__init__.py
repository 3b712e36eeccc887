"""Self-tests of device memory. Each test runs in its own process, because it may crash or hang."""
