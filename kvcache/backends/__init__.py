"""Kinds of memory for K and V, behind one interface, and the choice of one for a machine."""
