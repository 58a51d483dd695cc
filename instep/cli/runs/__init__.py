"""`instep runs`: what local run folders hold. Each command is a file; `chosen` finds the runs that words mean."""
