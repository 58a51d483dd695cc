"""Health of a job: what ranks write while they run, and the reports that are made from it.

- `heartbeat_file`: step, batch and phase of every rank on a node, in mapped memory; `hang_report`: the report that is
  written when the ranks hang.
- `error_report`: how a rank's traceback reaches the end of the agent's stderr; `root_cause`: which rank failed first.
- `run_status`: the one reader and writer of a run's `status.json`.
"""

__all__: list[str] = []  # internal: may change in any release
