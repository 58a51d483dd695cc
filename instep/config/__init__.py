"""The settings of `instep launch`.

- `settings`: the dataclass of the settings, with their checks; `layers`: the value of each setting, and whether it
  comes from the command line, the config file, the environment or the default; `spec`: the `LaunchSpec` made from the
  settings.
"""

__all__: list[str] = []  # this package is internal, and may change in any release
