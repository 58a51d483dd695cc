"""`instep runs`: the contents of local run folders. Each command is a file; `chosen` finds runs by words."""
