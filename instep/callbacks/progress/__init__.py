"""Progress bars: `bar` reads the run in a thread, `view` lays out the live view, `screen` shows it."""

from instep.callbacks.progress.bar import LiveProgressBar as LiveProgressBar
from instep.callbacks.progress.progress_bar import ProgressBar as ProgressBar
