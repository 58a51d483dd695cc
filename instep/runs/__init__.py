"""Read run folders as data, which `instep runs` and `instep dashboard` show.

Only `label` and `trash` write into run folders.

- `folder`: `find_runs` and `Run`, a small record of a run folder, whichever logger wrote it.
- `label`: the name, tags and note that a user gives a run; `naming`: names for runs that no user has named.
- `entries`: runs with hyperparameters and the last values of their metrics, which are cached in an index.
- `table`: a sweep as a table that fits a terminal; `where`: conditions on runs; `facts`: a single run as lines and
  rows.
- `trash`: removing runs.
- `status`: whether a run still goes on, how and why it ended, and the error of each failed rank.
- `metrics`: curves of a run, downsampled while they are read; `rows`: the files of each logger as rows.
- `ranks`: which ranks make the other ranks wait.
- `checkpoints`: the checkpoints of a folder, and whether they are complete.

A run folder is not trusted: only regular files inside it are opened, with limits, and a damaged file becomes a line of
text, never an exception. Text from it goes through `clean` before a terminal shows it.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.runs.folder import Run as Run
    from instep.runs.folder import find_runs as find_runs
    from instep.runs.label import Label as Label
    from instep.runs.metrics import Curve as Curve
    from instep.runs.metrics import Metrics as Metrics
    from instep.runs.metrics import MetricsReader as MetricsReader
    from instep.runs.status import RunStatus as RunStatus

__all__, __getattr__, __dir__ = loads(__name__)
