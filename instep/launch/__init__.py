"""Starting ranks: run a command as N processes under torchrun's elastic agent.

- `engine`: what to run, the job's exit code, whether this process is a rank; `command`: this program once more.
- `agent`: the elastic agent: signals, exit codes, ending the ranks; `prepare`: what they start from; `ranks`: those of
  one round; `affinity`: which cores they get; `forked`: ranks that are forks.
- `rendezvous`, `peers`, `nodes`: where agents and ranks meet, what agents tell each other, which node this is.
- `report`, `blame`: how a rank's traceback reaches the end of the agent's stderr, and which rank is the cause.
- `beats`, `hang_report`: the ranks' heartbeats as the agent sees them, and what it writes in a hang.
- `settings`, `sources`, `elsewhere`, `plan`: the settings of a launch, where each came from, what other launchers call
  it, and what is started for it.
- `functions`, `slurm`, `ray` (with `ray_place`): functions of a notebook, batch jobs, actors.

Invariants: a signal reaches each rank once, and only the rank (its data loader workers are needed for the save); no
rank outlives its agent; the job's exit code is 0 (done), 75 (preempted: saved, can be resumed), 76 (hung) or 1.
"""
