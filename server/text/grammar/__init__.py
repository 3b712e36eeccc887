"""Forms of answers -> constraints of the engine."""
