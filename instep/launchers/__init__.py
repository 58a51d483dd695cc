"""Start ranks in other ways than by `instep launch`.

- `notebook`: run functions as ranks, from a notebook or a test; `slurm`: batch jobs; `ray`, `ray_actor`: jobs on Ray.
"""

__all__: list[str] = []  # this package is internal, and may change in any release
