"""Progress bars. The live view: `bar` reads the run in a thread, `view` draws it, `screen` puts it where it is seen."""

from instep.callbacks.progress.bar import LiveProgressBar as LiveProgressBar
from instep.callbacks.progress.progress_bar import ProgressBar as ProgressBar
