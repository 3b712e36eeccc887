"""Sequences and pages: which memory stands behind which tokens of which sequence."""
