"""Health of a job: the files that the ranks write while they run, and reports of hangs and failures.

- `heartbeat_file`: the step, batch and phase of each rank on a node, in a memory-mapped file.
- `hang_report`: the report that is written when the ranks of a node hang.
- `error_report`: the file by which a rank gives its traceback to the agent, which prints it.
- `root_cause`: which rank's failure caused the failures of the others.
- `run_status`: reads and writes `status.json` and `failures/` in a run folder.
- `progress_file`: writes `progress.json` in a run folder.
"""

__all__: list[str] = []  # internal: may change in any release
