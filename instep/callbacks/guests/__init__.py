"""Callbacks that the core does not name: a run has one only where its user or an installed package gives it."""
