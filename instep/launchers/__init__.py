"""Other ways to start ranks: from a notebook, by SLURM, on Ray."""
