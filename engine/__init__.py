"""The engine: schedules, runs and samples steps of token ids, on the only thread that uses MLX."""
