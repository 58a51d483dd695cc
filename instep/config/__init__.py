"""Settings of a launch.

- `settings`: the dataclass with its checks; `layers`: which of command line, config file, environment and default gave
  each value; `spec`: the `LaunchSpec` that they make.
"""

__all__: list[str] = []  # internal: may change in any release
