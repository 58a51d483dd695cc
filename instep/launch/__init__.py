"""Starting ranks: run a command as N processes under torchrun's elastic agent; README.md has the files in order."""
