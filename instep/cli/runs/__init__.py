"""`instep runs`: list, show, label and remove local runs. `chosen` finds the runs that a command line names."""
