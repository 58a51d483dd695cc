"""Starting ranks: run a command as N processes under torchrun's elastic agent.

- `engine`: what to run, the job's exit code, whether this process is a rank.
- `command`: the command that runs this program again.
- `agent`: the elastic agent: signals, exit codes, ending the ranks.
- `rendezvous`: where agents and ranks meet.
- `report`: how a rank's traceback reaches the end of the agent's stderr.

Invariants: a signal reaches each rank once, and only the rank (its data loader workers are needed for the save); no
rank outlives its agent; the job's exit code is 0 (done), 75 (preempted: saved, can be resumed), 76 (hung) or 1.
"""
