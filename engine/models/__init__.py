"""Models: their description as data, their tensors, and their forward pass."""
