"""Readers of other packages' checkpoints. None of them runs code of the file."""
