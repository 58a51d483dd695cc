"""Starting ranks: run a command as N processes under torchrun's elastic agent.

- `engine`: what to run, the job's exit code, whether this process is a rank; `command`: this program once more.
- `agent`: the elastic agent: signals, exit codes, ending the ranks; `prepare`: what they start from, and the cores they
  get; `ranks`: those of one round; `forked`: ranks that are forks.
- `rendezvous`, `node_channel`, `signed`: where agents and ranks meet, what agents tell each other, and the MAC on it.

Settings of a launch are in `config`; heartbeats, reports of errors and hangs in `health`; other ways to start ranks in
`launchers`.

Invariants: a signal reaches each rank once, and only the rank (its data loader workers are needed for the save); no
rank outlives its agent; the job's exit code is 0 (done), 75 (preempted: saved, can be resumed), 76 (hung) or 1.
"""
