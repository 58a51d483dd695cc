"""Pipeline parallelism: `strategy` (for `MeshStrategy`), `runner` (the schedule), `split` (division into stages)."""
