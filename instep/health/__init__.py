"""Health of a job: what ranks leave while they run, and the reports that are made of it.

- `heartbeat_file`: step, batch and phase of every rank on a node, in mapped memory; `hang_report`: what is written when
  they stand still.
- `error_report`: how a rank's traceback reaches the end of the agent's stderr; `root_cause`: which rank failed first.
- `run_status`: the one reader and writer of a run's `status.json`.
"""

__all__: list[str] = []  # internal: may change in any release
