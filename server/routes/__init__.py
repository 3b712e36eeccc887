"""HTTP endpoints, one module per family of paths."""
