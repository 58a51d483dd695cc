"""`Delivery`: brings a logger's records to its files or tracker, and keeps track of which ones have arrived.

Each logger has one `Delivery` for all its runs. Records that are logged before a run wait in memory; while the logger
is open, a thread (`Sender`) sends them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from shutil import rmtree
from typing import Any
from weakref import WeakValueDictionary

from instep.errors import CorruptCheckpointError, InstepError
from instep.loggers import folders
from instep.loggers.appended import OutputFile
from instep.loggers.backlog import Backlog, Record, Row, RowKey, read_note, written_name
from instep.loggers.sender import Sender
from instep.loggers.trust import is_version, seal_of, sent_in, signed, version_in, why_not
from instep.types import PathLike
from instep.utils.atomic import replace
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

# seconds that a checkpoint waits for a slow tracker; then the records that are not sent are written to the disk
_CHECKPOINT_WAIT_S = 1.0
_MISTAKES = (TypeError, ValueError, AttributeError, NameError, ImportError)  # errors that a user's mistake raises

_OPEN: WeakValueDictionary[int, Delivery] = WeakValueDictionary()


def _close_in_child() -> None:
    """Mark all loggers as closed in a forked process: it has no sender thread, and the parent sends the records."""
    for delivery in _OPEN.values():
        delivery.sender, delivery.is_main = None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)  # done only once, since fork handlers cannot be removed


@dataclass(frozen=True)
class Writer:
    """What a `Delivery` must know of its logger: the hooks and the settings.

    Args:
        kind: class of the logger.
        save_dir: the logger's argument `save_dir`.
        base: folder that contains a folder for each run; None: the logger writes into the Trainer's run folder.
        asked: name of the folder in `base` that the user asked for; None if the user named none.
        sub_dir: folder below the run's folder.
        is_local: True: a resumed run removes what was written after the checkpoint. False: the tracker keeps it.
        owns_folders: whether the tracker's package chooses the folders of its runs.
        per_rank: whether every rank writes.
        x_axis: the x-axis of metrics: "step", "epoch", "time" or the name of a metric.
        start_timeout_s: seconds that the start of a run waits for the tracker to open.
        flush_timeout_s: seconds that the end of a run waits for the tracker.
        file: the logger's output file; an empty `OutputFile` if it has none.
        takes_many: whether the logger writes several rows of metrics in one call, all or none.
        hook: function that returns a hook by its name.
        finalize: the logger's method `finalize`, which a subclass may have overridden.
        code: function that records the git state when a new run begins; None if `save_code` is False.
        arguments: function that returns the plain arguments with which `instep runs sync` makes the logger again.
    """

    kind: type[Any]
    save_dir: Path | None
    base: Path | None
    asked: str | None
    sub_dir: str | None
    is_local: bool
    owns_folders: bool
    per_rank: bool
    x_axis: str
    start_timeout_s: float
    flush_timeout_s: float
    file: OutputFile
    takes_many: bool
    hook: Callable[[str], Callable[..., Any]]
    finalize: Callable[[str], None]
    code: Callable[[], None] | None
    arguments: Callable[[], dict[str, Any]]


class Delivery:
    """Bring a logger's records to its files or tracker, and keep track of which ones have arrived.

    Args:
        writer: hooks and settings of the logger.
        version: the logger's argument `version`: the run's version, or the id of a run of the tracker.
    """

    def __init__(self, writer: Writer, version: int | str | None) -> None:
        self.writer = writer
        self._name = writer.kind.__name__
        self._given_version = version
        self.version = version
        """Version or id of the run: given by the user, taken from the resumed run, or chosen."""
        self.run_dir: Path | None = None
        """The run folder; None before the start."""
        self.log_dir: Path | None = None
        """The folder that the logger writes into; None before the start, and on ranks that do not write."""
        self.is_main = True
        """Whether this process writes."""
        self.status = "interrupted"
        """How the run ended: "success", "interrupted" or "failed"."""
        self.resumed = False
        """Whether the run goes on from a checkpoint; False again once the logger has started."""
        self.sends_rest = False
        """Whether this logger only sends the waiting records of a finished run, for `instep runs sync`."""
        self.is_strangers = False
        """Whether another user may have written the note (`<logger>.json`) of the finished run."""
        self.logged: dict[str, int] = {}
        """The last logged step of each name; at the start of a resumed run, the steps in its checkpoint."""
        self.last_step = -1
        """The highest step that was logged."""
        self.step, self.time_s = 0, 0.0
        """Global step of the record that is being written, and the time at which it was made, in seconds since 1970."""
        self._step_of_run: Callable[[], int] | None = None
        self._claim: Callable[[], Path] | None = None  # function that makes the folder of the Trainer's next run
        self._decides = False  # whether this logger's `save_dir` contains the Trainer's run folder
        # `_number`: index of this logger among the run's loggers of its class. `_rank`: rank of this process if every
        # rank writes.
        self._number = self._rank = 0
        self._began_s = 0.0
        self._x: float | None = None  # last position on the x-axis, if the axis is not "step"
        self._lacks_x = False  # whether the user was warned that no metric has the name of the x-axis
        self._waiting: list[Record] = []  # records that were logged before the start
        self._early: Path | None = None  # folder of the logger, if it was opened before a run
        self.opened_folder: Path | None = None
        """New run folder that the logger opened before a run began; the run then uses this folder."""
        self._rest_dir: Path | None = None  # folder of a finished run whose records are sent now
        self._home = Path()  # working directory, to which relative paths refer
        self.sender: Sender | None = None
        """The thread that sends records while the logger is open; None while the logger is closed."""
        self._note = Path()  # path of the note: a JSON file beside the backlog
        self._backlog: Backlog | None = None
        self._marks = Marks(exact=writer.is_local)
        self.in_doubt = 0  # number of records at the front of the queue; a failed call may have sent some of them
        self._has_escaped = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sender": None, "_backlog": None, "_step_of_run": None}  # threads cannot be copied

    # ---- opening and closing, and the folder

    @property
    def is_open(self) -> bool:
        """Whether the logger is open, so that its sender thread runs."""
        return self.sender is not None

    @property
    def folder(self) -> Path:
        """The folder that an open logger writes into; for use in hooks."""
        assert self.log_dir is not None
        return self.log_dir

    def attach(self, claim: Callable[[], Path], decides: bool, number: int) -> None:
        """Connect the logger with a Trainer, which will call `start` at its next run.

        Args:
            claim: function that creates the run folder, if it does not exist, and returns it.
            decides: whether this logger's `save_dir` chooses the run folder.
            number: index of this logger among the run's loggers of its class.
        """
        self._claim, self._decides, self._number = claim, decides, number

    def start(
        self,
        run_dir: PathLike,
        is_main: bool = True,
        begins: bool = False,
        step_of_run: Callable[[], int] | None = None,
    ) -> None:
        """Open the logger for a run, and send the records that were logged before.

        This method does nothing if the logger is already open in the folder of the run.

        Args:
            run_dir: the run folder, which holds the backlog. A logger with a `save_dir` may write its files elsewhere.
            is_main: whether this is the main process; other processes write only if the logger is `per_rank`.
            begins: whether the run is new; a new run must not write into the folder of an earlier run.
            step_of_run: function that returns the global step, for records that are logged without a step.

        Raises:
            InstepError: the logger cannot be opened with these settings. If the tracker cannot be reached, no error is
                raised: the thread tries again during the run.
        """
        run_dir, self._step_of_run = Path(run_dir), step_of_run
        early, self._early, self.opened_folder = self._early, None, None
        self.is_main = is_main or self.writer.per_rank
        if not self.is_main:
            self._waiting.clear()
            return
        folder, version = self._choose(run_dir, begins and early is None)
        if not is_main:
            self._rank = _environment_rank()
            folder /= f"rank-{self._rank}"
        # Do not open a tracker's run again: that would end the run, which the user may hold as `logger.experiment`.
        stays = early is not None and (self.writer.owns_folders or folder.absolute() == early.absolute())
        if self.is_open:
            if stays or self.run_dir == run_dir:
                self.run_dir = run_dir
                return
            self.close("success")
        if early is not None and not stays:
            warn_user(f"{self._name} wrote into {early} before the run, which goes on in {folder}")
        self.version = version
        self._open(run_dir, folder)

    def take_up(
        self, version: int | str | None, number: int, rank: int, status: str, folder: Path, is_strangers: bool
    ) -> None:
        """Prepare the next `start` to send only the waiting records of a finished run; for `instep runs sync`.

        Args:
            version: version of the finished run.
            number: index of this logger among the run's loggers of its class.
            rank: rank of the process that wrote the records.
            status: how the run ended.
            folder: folder that the process wrote into.
            is_strangers: whether another user may have written the note (`<logger>.json`) of the run.
        """
        self.version, self._number, self._rank, self.status = version, number, rank, status
        self._rest_dir, self.is_strangers = folder, is_strangers
        self.resumed = self.sends_rest = True

    def discard(self) -> None:
        """Delete the records logged before a run, and their folder, since the ranks to be launched log them again."""
        self._waiting.clear()
        if self._early is not None:
            self.close("success")
            if self.opened_folder is not None:
                rmtree(self.opened_folder, ignore_errors=True)
            self._early = self.opened_folder = self.run_dir = self.log_dir = None
            self.version = self._given_version

    def open(self) -> bool:
        """Open the logger if it is closed, also without a run; return False if this process does not write."""
        if self.sender is None and self.is_main:
            if self.run_dir is not None and self.log_dir is not None:  # the run has ended: open its folder again
                self._open(self.run_dir, self.log_dir)
            elif self._is_main_here():
                run_dir = self._choose_early()
                is_tracker = self.writer.owns_folders and self.writer.save_dir is not None
                is_new = not is_tracker and not (run_dir.exists() and any(run_dir.iterdir()))
                self.opened_folder = run_dir if is_new else None
                folder, self.version = self._choose(run_dir, False)
                self._open(run_dir, folder)
                self._early = folder
        return self.is_open

    def _choose_early(self) -> Path:
        writer = self.writer
        if self._decides or writer.save_dir is None:
            return folders.make_next(Path.cwd() / folders.RUNS) if self._claim is None else self._claim()
        if writer.base is None:
            return writer.save_dir
        return (
            folders.make_next(writer.base) if self.version is None else writer.base / folders.folder_name(self.version)
        )

    def _choose(self, run_dir: Path, begins: bool) -> tuple[Path, int | str | None]:
        """Return the folder that the logger writes into during a run, and the run's version."""
        base, asked = self.writer.base, self.writer.asked
        if self._rest_dir is not None:
            return self._rest_dir, self.version
        folder, version = run_dir, self.version
        if base is not None:
            run, named = folders.name_in(base, run_dir, asked), base / (asked or "")
            asked = run if self._decides and run is not None else asked
            free, number = folders.is_free(named), folders.next_version(base)
            last = None if begins or version is None else folders.folder_name(version)
            place = folders.choose_place(asked, run=run, goes_on=last, is_free=free, next_number=number)
            version = folders.version_of(place.name)
            folder = run_dir if place.name == run else base / place.name
            if begins and asked not in (None, place.name):
                warn_user(f"{named} is taken: it has the files of another run. {self._name} writes into {folder}")
        return folder / (self.writer.sub_dir or ""), version

    def _is_main_here(self) -> bool:
        """Return True if this process is rank 0 by the launcher's environment variables."""
        self.is_main = _environment_rank() == 0
        return self.is_main

    def _close_at_exit(self) -> None:
        atexit.unregister(self._finalize)
        # Exit handlers run in reverse order: this one must run before that of the tracker's package.
        atexit.register(self._finalize)

    def _finalize(self) -> None:
        """Close the logger at the end of the program if it is still open or records still wait."""
        if self.is_open or self._waiting:
            # `last_value` is the error that ends a script. An interactive session may go on after it.
            status = "failed" if hasattr(sys, "last_value") and not hasattr(sys, "ps1") else "success"
            try:
                self.writer.finalize(status)
            finally:
                self.close(status)  # an overridden `finalize` may not call its base method

    def _open(self, run_dir: Path, folder: Path) -> None:
        self.run_dir, self.log_dir, self._home = run_dir, folder, Path.cwd()
        self._began_s = self._began_s or time.time()
        is_new = not self.resumed
        if self.resumed:
            self._marks = Marks(None if self.sends_rest else dict(self.logged), exact=self.writer.is_local)
        number, rank = (f"-{self._number + 1}" * (self._number > 0), f"-rank-{self._rank}" * (self._rank > 0))
        backlog = self._backlog = Backlog(run_dir.absolute() / "loggers" / f"{self._name}{number}{rank}.jsonl")
        note = self._note = backlog.path.with_suffix(".json")
        backlog.refuses, backlog.announce = self._refuses, self.write_note
        backlog.note, backlog.find_seal = note if self.writer.is_local else None, lambda: seal_of(note)
        sender = self.sender = Sender(self, self._name, backlog)
        try:
            sender.begin(self.writer.start_timeout_s)
        except BaseException:
            self.sender = None
            raise
        _OPEN[id(self)] = self
        self._close_at_exit()
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            sender.backlog.append(record)
            self._note_steps(record)
        if self.writer.code is not None and is_new:
            self.writer.code()

    # ---- taking records

    def put(self, hook: str, args: tuple[Any, ...], step: int | None = None) -> None:
        """Queue a call of a hook, which the sender thread makes now or after the next start.

        Args:
            hook: name of the hook.
            args: arguments of the call, as plain values.
            step: the global step; None if the call has none.
        """
        record = Record(hook, args, step, time.time())
        if self.sender is None and (self.run_dir is not None or (self.writer.base is not None and self._claim is None)):
            self.open()  # no Trainer will open the logger, or its run has ended
        if self.sender is not None:
            self.sender.backlog.append(record)
            self._note_steps(record)
        elif self._waiting or self._is_main_here():
            self._waiting.append(record)
            self._close_at_exit()

    def _note_steps(self, record: Record) -> None:
        if record.step is not None:
            self.logged.update(dict.fromkeys(record.names(), record.step))

    def ask(self, function: Callable[[], Any], after_all: bool = True) -> Any:
        """Run a function in the sender thread, and return its result; None if it could not run or end in time.

        Args:
            function: function without arguments. The logger is opened first if it is closed.
            after_all: whether to wait until all earlier records are sent. Then an error of the function becomes a
                warning, and the result is None; only an InstepError is raised.
        """
        if not self.open() or self.sender is None:
            return None
        if not self.sender.is_begun:
            warn_user(f"{self._name} is not open yet: what needs the tracker or the model itself is left out")
            return None
        try:
            return self.sender.ask(function, self.writer.flush_timeout_s, after_all=after_all)
        except TimeoutError as error:
            warn_user(str(error))
        except Exception as error:  # a tracker's error must not end the run
            if isinstance(error, InstepError) or not after_all:
                raise
            warn_user(f"{self._name} failed: {type(error).__name__}: {error}")
        return None

    def step_now(self) -> int:
        """Return the step for a value that is logged without a step: the run's step, or the last logged step."""
        if self._step_of_run is not None and self.is_open:
            return self._step_of_run()
        return max(self.last_step, 0)

    def place(self, metrics: Mapping[str, float], step: int) -> int:
        """Return the metrics' x-axis position; if they lack the metric of the x-axis, the last record's position."""
        axis = self.writer.x_axis
        if axis == "step":
            return step
        if axis == "time":
            self._x = time.time() - self._began_s if self._began_s else 0.0
        else:
            self._x = metrics.get(axis, self._x)
        if self._x is None and metrics and not self._lacks_x:
            self._lacks_x = True
            warn_user(
                f"{self._name}(x_axis={axis!r}): there is no metric of that name yet; what is logged before it is "
                "drawn over the steps"
            )
        return int(step if self._x is None else self._x)

    def save(self, timeout_s: float | None = None) -> None:
        """Send all waiting records to the tracker; records that cannot be sent are written to the disk."""
        if self._waiting:
            self.open()
        timeout_s = self.writer.flush_timeout_s if timeout_s is None else timeout_s
        if self.sender is not None and self.sender.flush(timeout_s, early=True):
            try:
                self.sender.ask(self.writer.hook("_save"), timeout_s)
            except Exception as error:  # noqa: BLE001  a tracker never ends a run
                warn_user(f"{self._name} could not flush: {type(error).__name__}: {error}")

    def close(self, status: str) -> None:
        """Send the waiting records and close the logger; a second call does nothing."""
        if self._waiting:
            self.open()
        # Clear `self.sender` first, so that the logger is closed even after an error below.
        sender, self.sender = self.sender, None
        atexit.unregister(self._finalize)
        if sender is not None:
            self.status = status
            sender.close(partial(self.writer.hook("_finalize"), status), self.writer.flush_timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's version and last step, each metric's last step, and for a time axis the run's start."""
        if self.is_open:
            self.save(_CHECKPOINT_WAIT_S)
        state: dict[str, Any] = {"version": self.version, "step": self.last_step, "logged": dict(self.logged)}
        if self.writer.x_axis == "time":
            state["began_s"] = self._began_s
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `start` continue the run whose state is passed.

        Raises:
            CorruptCheckpointError: the version in the state is a path that leads out of the folder of logs.
        """
        if self.is_open:
            self.close("success")
        if self._early is not None:
            self.version = self._given_version
        if self.version is None:
            version = state.get("version")
            if not is_version(version):
                raise CorruptCheckpointError(
                    f"the checkpoint's {self._name} has the version {version!r}, which is no name of a folder. Give "
                    f"version=... to {self._name}, or resume with Resume(loggers=False)."
                )
            self.version = version
        self.last_step = max(state.get("step", -1), state.get("global_step", -1))
        logged = state.get("logged")
        self.logged = dict(logged) if isinstance(logged, dict) else {}
        self._began_s = float(state.get("began_s", 0.0))
        self.resumed = True

    # ---- called in the sender thread

    def start_writer(self, backlog: Backlog) -> int:
        """Open the tracker, and queue the records that an earlier process has left; return their number."""
        if self.resumed and self.version is None and not self.writer.is_local:
            self.version = version_in(read_note(self._note))
        try:
            self.writer.hook("_start")()
        except Exception as error:
            if isinstance(error, InstepError) or not (self.writer.is_local or isinstance(error, _MISTAKES)):
                raise
            raise self.start_error(error) from error
        return backlog.take_over(self._keep, self.writer.file.row_count())

    def start_error(self, error: Exception) -> InstepError:
        """Return the error to raise if the hook `_start` failed, with the hook's error and advice."""
        return InstepError(
            f"{self._name} failed in start: {type(error).__name__}: {str(error).rstrip('.')}. It writes into "
            f"{str(self.log_dir)!r}. Repair the cause, or leave this logger out of Trainer(logger=...)."
        )

    def begin(self, left_over: int) -> None:
        """In a resumed run, find out which records the tracker already has.

        Args:
            left_over: number of records at the front of the queue that an earlier process has left.
        """
        if self.resumed:
            writer, by_step = self.writer, self.writer.x_axis == "step"
            sent = {} if writer.is_local else sent_in(read_note(self._note))
            rows = writer.file.later_rows if by_step else ()
            self._marks.resume(sent, writer.hook("_delivered")() if by_step else None, left_over, rows)
        self.resumed = False
        self.rest()

    def _keep(self, record: Record) -> bool:
        after_checkpoint = self.resumed and not self._marks.belongs(record)
        return not (self.writer.file.holds(record) or after_checkpoint)

    def _refuses(self, record: Record) -> bool:
        why = clean(why_not(record, self._note.parent.parent))
        if why:
            warn_user(f"{self._name} does not take a record that you did not write: {why}")
        return bool(why)

    def write(self, records: list[Record]) -> int:
        """Call the hooks for the first record, or for all rows of metrics at the front of the queue.

        Returns:
            The number of records that are done: written, or left out since the tracker has them.
        """
        writer, marks = self.writer, self._marks
        rows = list(takewhile(lambda record: record.hook == "_log_metrics", records))
        records = rows or records[:1]
        if self.in_doubt and not writer.is_local and writer.x_axis == "step":
            has = writer.hook("_delivered")()
            if has is not None:
                marks.doubt(has, self.in_doubt)
        self.in_doubt = max(self.in_doubt, len(records))
        left = [self._written(record) for record in marks.missing(records)]
        if left and rows and writer.takes_many:
            self.time_s = left[-1].time_s
            writer.hook("_log_rows")([Row(record.args[0], record.args[1], record.time_s) for record in left])
        else:
            for record in left:
                self.time_s = record.time_s
                self.step = self.step if record.step is None else record.step
                writer.hook(record.hook)(*record.args)
        self.in_doubt = 0
        marks.note(records)
        return len(records)

    def _written(self, record: Record) -> Record:
        """Return the record with escapes in those names of metrics that cannot be written as they are."""
        names = record.names() if record.hook == "_log_metrics" else []
        changed = {name: written_name(name) for name in names}
        wrong = [name for name, text in changed.items() if name != text]
        if not wrong:
            return record
        if not self._has_escaped:
            self._has_escaped = True
            warn_user(
                f"the name {wrong[0]!r} is no text of UTF-8, or would control a terminal: {self._name} writes it as it "
                "is here"
            )
        metrics = {changed.get(name, name): value for name, value in record.args[0].items()}
        return record._replace(args=(metrics, *record.args[1:]))

    def rest(self) -> None:
        """Store in the logger's note file which steps the tracker has; called when no record waits, and regularly."""
        if not self.writer.is_local:
            self.write_note()

    def write_note(self) -> None:
        """Write the note, a JSON file beside the backlog, with the logger's class, arguments, folder and sent steps."""
        kind, run, folder = self.writer.kind, self._note.parent.parent, Path(self._home, self.folder)
        arguments = self.writer.arguments()
        if self.writer.save_dir is not None:
            arguments["save_dir"] = Path(self._home, self.writer.save_dir)
        seal = None if self._backlog is None else self._backlog.seal
        note = {
            "logger": f"{kind.__module__}:{kind.__qualname__}",
            "arguments": {name: value for name, value in arguments.items() if value is not None},
            "version": self.version,
            "status": self.status,
            "sent": dict(self._marks.sent),  # a copy of the dict, since another thread may change it
            "id": seal and seal.about,
            "cwd": self._home,
            # A folder inside the run folder is written as a relative path, since the run folder may be moved.
            "folder": folder.relative_to(run) if folder.is_relative_to(run) else folder,
        }
        note = json.loads(json.dumps(note, default=str))
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            replace(self._note, json.dumps(note if self.is_strangers else signed(note)).encode())
        except OSError as error:
            warn_user(f"{self._note} could not be written: {error}")


def _environment_rank() -> int:
    from instep.state import read_environment  # imported late: loads torch, which a logger alone does not need

    return read_environment().rank


class Marks:
    """The steps that a tracker already has of each metric, so that a resumed run sends no record twice.

    Args:
        at_checkpoint: for each metric, the last step that was logged before the checkpoint.
        exact: whether each record that an earlier process has left was looked for in the logger's file. Those that are
            still in the queue must then be sent.
    """

    def __init__(self, at_checkpoint: Mapping[str, int] | None = None, exact: bool = False) -> None:
        self.sent: dict[str, int] = {}
        """The last step that was sent, by the name of the metric."""
        self._exact = exact
        self._at_checkpoint = at_checkpoint
        self._has: Mapping[str, int] = {}
        self._rows = Counter[RowKey]()
        self._left_over = 0

    def resume(
        self, sent: Mapping[str, int], has: Mapping[str, int] | None, left_over: int, rows: Iterable[RowKey] = ()
    ) -> None:
        """Set which steps the tracker has when a run is resumed.

        Args:
            sent: for each metric, the last step that the earlier process had sent, from its note.
            has: for each metric, the last step that the tracker has; None: unknown, so `sent` is used.
            left_over: number of records at the front of the queue that the earlier process could not send.
            rows: step and metric names of each row after the checkpoint that the logger's file has kept. The resumed
                run logs these again. For each row, one record with the same step and names is not written.
        """
        self.sent, self._rows = dict(sent), Counter(rows)
        self._has = sent if has is None else {**{name: at for name, at in sent.items() if ":" in name}, **has}
        self._left_over = left_over

    def belongs(self, record: Record) -> bool:
        """Return whether a record was logged before the checkpoint. The resumed run logs later records again."""
        before, step = self._at_checkpoint, record.step
        return before is None or step is None or all(step <= before.get(name, -1) for name in record.names())

    def doubt(self, has: Mapping[str, int], number: int) -> None:
        """Set which steps the tracker has after a failed call that may have sent some of the first `number` records."""
        self._has, self._left_over = {**self._has, **has}, max(self._left_over, number)

    def missing(self, records: list[Record]) -> list[Record]:
        """Return the next records without the values that the tracker already has."""
        if not self._has and not self._rows:
            return records
        parts = [self._missing(record, index < self._left_over) for index, record in enumerate(records)]
        return [part for part in parts if part is not None]

    def _missing(self, record: Record, left_over: bool) -> Record | None:
        step, low = record.step, {} if left_over else self._at_checkpoint
        if step is None or low is None or (left_over and self._exact):
            return record
        names = record.names()
        if self._rows:
            key = RowKey.of_record(record)
            is_kept = self._rows[key] > 0
            self._rows[key] -= is_kept
            return None if is_kept else record
        there = {name for name in names if low.get(name, -1) < step <= self._has.get(name, -1)}
        if not there or record.hook != "_log_metrics":
            return None if there else record
        left = {name: value for name, value in record.args[0].items() if name not in there}
        return record._replace(args=(left, *record.args[1:])) if left else None

    def note(self, records: list[Record]) -> None:
        """Store that these records have been sent."""
        self._left_over = max(0, self._left_over - len(records))
        for record in records:
            if record.step is not None:
                self.sent.update(dict.fromkeys(record.names(), record.step))
