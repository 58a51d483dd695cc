"""Pipeline parallelism: the strategy, its schedule, and how a module is split into stages."""
