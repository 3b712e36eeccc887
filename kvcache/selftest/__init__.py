"""Self-tests of a substrate on this machine, each in a process of its own: a crash or a hang there
is a result here."""
