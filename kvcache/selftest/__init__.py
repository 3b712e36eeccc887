"""Self-tests of a substrate, each in its own process: a crash or a hang is a result."""
