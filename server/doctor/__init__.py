"""The ``quire doctor`` command."""
