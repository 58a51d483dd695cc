"""Ways to start ranks besides `instep launch`.

- `notebook`: functions as ranks, from a notebook or a test; `slurm`: batch jobs; `ray`, `ray_actor`: actors on Ray.
"""

__all__: list[str] = []  # internal: may change in any release
