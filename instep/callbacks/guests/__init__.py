"""Callbacks that the core does not import: a run has one only if its user or an installed package adds it."""
