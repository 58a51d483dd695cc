"""The live progress bar: `bar` reads counters and metrics in a thread, `view` lays them out, `screen` shows them."""

from instep.callbacks.progress.bar import LiveProgressBar as LiveProgressBar
from instep.callbacks.progress.progress_bar import ProgressBar as ProgressBar
