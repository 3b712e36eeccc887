"""A model as data, its tensors, and its forward over flat tokens."""
