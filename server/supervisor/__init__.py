"""Several models behind one address: a process for each, one budget of memory over all."""
