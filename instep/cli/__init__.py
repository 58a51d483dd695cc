"""The `instep` command: one file for each sub-command, loaded when it is called."""
