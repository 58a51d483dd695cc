"""Start a command as N ranks under torchrun's elastic agent; README.md in this folder lists the files in order."""

__all__: list[str] = []  # this package is internal, and may change in any release
