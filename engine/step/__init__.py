"""Steps: plan one, launch it, read it, and apply its outcome."""
