"""Nothing here is a test of instep: the files run in processes of `run.py`, where their folder is on the path."""

collect_ignore_glob = ["*.py"]
