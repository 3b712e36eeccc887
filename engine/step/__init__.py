"""Steps: plan one, launch it, read it, and tell what came of it."""
