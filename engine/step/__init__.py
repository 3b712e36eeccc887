"""The life of a step: plan it, launch it, read it, and apply its outcome."""
