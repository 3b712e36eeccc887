"""What is wrong with this machine, its MLX or its substrates, without being taken down by it."""
