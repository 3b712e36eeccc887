"""Several models behind one address: a process per model, and one memory budget for all."""
