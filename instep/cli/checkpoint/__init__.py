"""`instep checkpoint`: look into, check, compare and convert checkpoints."""
