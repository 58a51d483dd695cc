"""The live view of a run: `bar` reads the run in a thread, `view` draws it, `screen` puts it where it is seen."""

from instep.callbacks.progress.bar import ProgressBar as ProgressBar
