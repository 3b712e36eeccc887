"""What a model is, which tensors it has, and its forward over flat tokens."""
