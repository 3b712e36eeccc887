"""How fast quire is, beside other software on the same machine: ``python -m tests.bench``."""
