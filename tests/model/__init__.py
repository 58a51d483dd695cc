"""The meaning of a run, in plain Python: README.md says how to read it."""
