"""Starting ranks: run a command as N processes under torchrun's elastic agent; README.md has the files in order."""

__all__: list[str] = []  # internal: may change in any release
