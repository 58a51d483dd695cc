"""Settings of a launch.

- `settings`: what they are, and their checks; `layers`: which of script, command line, config file and environment gave
  each value; `porting`: what other launchers call them; `spec`: the `LaunchSpec` that they make.
"""
