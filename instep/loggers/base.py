"""The base class of loggers: it takes what is logged and keeps the books; a subclass writes, in a thread of its own."""

from __future__ import annotations

import atexit
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from instep.errors import CorruptCheckpointError, InstepError, LogError, SettingError, UsageError, one_of
from instep.loggers.folders import RUNS, folder_name, is_free, make_next, next_version, version_of
from instep.types import Location, PathLike
from instep.utils.checks import FLAG, PATH, TEXT, above_zero
from instep.utils.hparams import plain_values
from instep.utils.imports import check_installed
from instep.utils.paths import local_path, to_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.nn import Module

    from instep.loggers.appended import AppendedFile
    from instep.loggers.backlog import Record, Row, RowKey
    from instep.loggers.delivery import Delivery, Marks
    from instep.loggers.kinds import Artifact, Audio, Code, Histogram, Image, Table, Video

T = TypeVar("T")
_Call: TypeAlias = "tuple[str, tuple[Any, ...], int | None, float]"  # of a hook: name, arguments, step, time

_MOST_TIMEOUT_S = 1e9  # 30 years; locks of the system take no infinity
_CHECKPOINT_WAIT_S = 1.0  # a checkpoint waits no longer for a slow tracker: what it has not taken is on the disk then

_OPTIONS = ("save_dir", "name", "version", "prefix", "x_axis", "log_model", "save_code", "per_rank", "flush_timeout_s")


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `Logger` out of those of a subclass, which hands the rest to its package."""
    return {name: arguments.pop(name) for name in _OPTIONS if name in arguments}


def numbered(name: str, values: Sequence[T]) -> list[tuple[str, T]]:
    """Give each of several values a name of its own, `<name>/<i>`; one alone keeps the name."""
    return [(name if len(values) == 1 else f"{name}/{i}", value) for i, value in enumerate(values)]


class NoExperiment:
    """Stands for a logger's writer where there is none to write: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logger:
    """Base of loggers, which write a run's metrics, hyperparameters, pictures, files and so on.

    The public methods may be called at any time and on any rank: only the main process writes, unless `per_rank`. They
    put what they get into a queue; a thread of the logger's own calls the hooks of the subclass, in order, so that a
    slow tracker holds up no step. A hook that raises does not end the run: a warning says so, and the record is tried
    again after a pause; what does not fit into the memory or has not arrived at the end waits in
    `<run>/loggers/<logger>.jsonl`, which `instep runs sync` sends. `save`, `finalize` and a checkpoint send what waits.

    What comes before `start` is kept and written at the start, or by `save`, `finalize` and the program's end where no
    run starts; with a `save_dir`, and before a Trainer has the logger, the logger opens at once. What comes after
    `finalize` opens it again.

    A subclass overrides hooks: `_start`, `_log_metrics`, `_log_hyperparams`, `_log_text`, `_log_image` and so on, as
    below. They run while the logger is open, with plain values. What a subclass has no hook for is left out, with one
    warning.

    A logger writes into `log_dir`: the run folder that the Trainer gives to `start`, or, with an explicit `save_dir`,
    `<save_dir>/<name>/<version>`, where the version is the next free `version_N` unless given. The first logger with a
    `save_dir` decides: that folder is the run folder then, with the checkpoints, and loggers of the same `save_dir` and
    `name` write there too. Opened before a run a logger takes the folder that the run will have; where that turns out
    to be another one (the run is resumed, or has another `default_root_dir`), what was written moves there.

    Args:
        save_dir: where run folders go; the first logger that has one decides. None: the run folder.
        name: the run's name; with `save_dir` the folder's name.
        version: an int N for the folder `version_N`, or the folder's name; used with `save_dir` only.
        prefix: put before every name, joined by "-".
        x_axis: what metrics are drawn over: "step" (optimizer steps), "epoch", "time" (seconds since the run began) or
            the name of a metric, such as one of ThroughputMonitor's totals of samples or tokens.
        log_model: checkpoints that go to the tracker: "all" each one as it is saved, "best" or True the best one at
            the end, or the last one where nothing is monitored.
        save_code: record the git commit, what is not committed, and the script's path.
        per_rank: every rank writes, into a folder `rank-<n>` or a run of its own.
        flush_timeout_s: seconds that the end of the run waits for a tracker at most.

    Raises:
        SettingError: `save_dir` is a URL, or another argument is not of its kind.
        MissingPackageError: the tracker's package is not installed; the text has the `pip install`.

    Example:
        >>> from pathlib import Path
        >>> class ListLogger(Logger):
        ...     def __init__(self):
        ...         super().__init__(name="list")
        ...         self.rows = []
        ...
        ...     def _log_metrics(self, metrics, step):
        ...         self.rows.append((step, metrics))
        >>> logger = ListLogger()
        >>> logger.log_metrics({"loss": 0.5}, step=10)
        >>> logger.start(Path("run"), is_main=True)
        >>> logger.finalize()
        >>> logger.rows
        [(10, {'loss': 0.5})]
    """

    # Defaults on the class: a subclass that forgets `super().__init__()` still works.
    _save_dir: Path | None = None
    _name: str | None = None
    _version: int | str | None = None
    _given_version: int | str | None = None  # the user's; `_version` is also what was chosen, or is resumed
    _run_dir: Path | None = None
    _log_dir: Path | None = None
    _is_main: bool = True
    _open: bool = False
    _early: bool = False  # opened before any run
    _earlier: Path | None = None  # where it wrote then, when the run goes on elsewhere: that stays there
    _fresh: bool = False  # nothing was in that folder
    _among_others: bool = False  # something was, and the user named it: what is written there stays there
    _claim: Callable[[], Path] | None = None  # the Trainer's, which gives the folder of its next run
    _decides: bool = False  # the Trainer's run folder is this logger's
    _resumed: bool = False
    _kept: list[_Call] | None = None  # what came before it was open
    _delivery: Delivery | None = None
    _marks: Marks | None = None
    _logged: dict[str, int] | None = None  # the last step by name; of a resumed run that of its checkpoint
    _refused: frozenset[str] = frozenset()  # hooks that the subclass lacks, said once
    _sends_rest: bool = False  # of a run that is over
    _rest_dir: Path | None = None  # where that wrote
    _is_strangers: bool = False  # that run's note was not written by this user
    _appended: AppendedFile | None = None  # that only grows, of a logger with one
    _had_rows: tuple[int, AbstractSet[int]] = 0, frozenset()  # at the start: how many first ones, and which others
    status: str = "interrupted"
    """How the run ended: "success", "interrupted" or "failed"."""
    _in_doubt: int = 0  # records in front of which a part may have arrived: sending them failed
    _number: int = 0  # among the run's loggers of this class
    _rank: int = 0  # of a process that writes for itself
    _began_s: float = 0.0  # when the run began, in seconds since 1970
    _step: int = 0  # of the record that is being written
    _now_s: float = 0.0  # when that was made, in seconds since 1970
    _x: float | None = None  # the last place on another x-axis than the steps
    _lacks_x: bool = False  # said that nothing has that name
    step_of_run: Callable[[], int] | None = None
    """Tells the global step, of what is logged without one; the Trainer sets it."""
    _last_step: int = -1
    _prefix: str = ""
    _writers: AbstractSet[str] = frozenset()  # attributes of a subclass that exist while it is open
    _draws_graph: bool = False  # the Trainer calls `log_graph` at the start of fit
    _x_axis: str = "step"
    log_model: bool | str = False
    _save_code: bool = False
    _per_rank: bool = False
    _flush_timeout_s: float = 30.0
    _start_timeout_s: float = 60.0  # a tracker that takes longer opens while the run goes on

    project_argument: str = "name"
    """The constructor's argument that takes the project of `accelerator.init_trackers(project)`."""
    _NEEDS: tuple[str, str | None] | None = None
    """Package and extra that the subclass needs."""
    _LOCAL: bool = True
    """Whether the subclass, on a resume, takes back what it wrote after the checkpoint. False: what was given to the
    tracker stays there, and a resumed run does not send it a second time."""
    _OWN_FOLDERS: bool = False
    """Whether the tracker's package names the places of its runs: such a logger never decides the run folder."""
    _PATHS: Mapping[str, str | None] = {}
    """Which of `_SYNC` name a file, folder or URL, each with the environment variable that stands for it: "" for none,
    None where a note that another user wrote does not decide it."""
    _HOSTS: Mapping[str, str | None] = {}
    """Which of `_SYNC` name a host in another way than by a URL, as in `_PATHS`."""
    _SYNC: tuple[str, ...] = ()
    """Attributes, less the underscore in front, that `instep runs sync` gives to the constructor: no secrets."""

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        x_axis: str = "step",
        log_model: bool | Literal["all", "best"] = False,
        save_code: bool = False,
        per_rank: bool = False,
        flush_timeout_s: float = 30.0,
        **unknown: Any,
    ) -> None:
        for given in unknown:  # here, and not by Python: this text says of which class, and what is meant
            known = inspect.signature(type(self)).parameters
            names = dict.fromkeys([*known, *inspect.signature(Logger).parameters])
            for kind in ("self", "options", "unknown", "kwargs"):
                names.pop(kind, None)
            raise SettingError(f"{type(self).__name__}: {one_of('argument', given, names)}", field=given)
        if "://" in str(save_dir):
            raise SettingError(
                f"{type(self).__name__}(save_dir={str(save_dir)!r}): logs are written into a folder of this machine. "
                "Give its path; checkpoints may go to a URL, by ModelCheckpoint(dirpath=...).",
                field="save_dir",
                got=save_dir,
            )
        self.check_installed()
        self._save_dir = None if save_dir is None else local_path(PATH("save_dir", save_dir))
        self._name = name
        self._version = self._given_version = version
        self._prefix = f"{prefix}-" if prefix else ""
        self._x_axis = TEXT("x_axis", x_axis)
        if log_model not in (True, False, "all", "best"):
            raise one_of("log_model", log_model, (True, False, "all", "best"))
        self.log_model = log_model
        self._save_code = FLAG("save_code", save_code)
        self._per_rank = FLAG("per_rank", per_rank)
        seconds = above_zero("of seconds above 0")("flush_timeout_s", flush_timeout_s)
        self._flush_timeout_s = min(seconds, _MOST_TIMEOUT_S)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is closed: it opens a writer of its own.
        closed = {"_open": False, "_delivery": None, "step_of_run": None}
        return {**self.__dict__, **closed, **dict.fromkeys(self._writers & self.__dict__.keys())}

    @classmethod
    def check_installed(cls) -> None:
        """Raise where the tracker's package is missing.

        Raises:
            MissingPackageError: the text has the `pip install`.
        """
        if cls._NEEDS is not None:
            package, extra = cls._NEEDS
            check_installed(package, extra=extra, purpose=cls.__name__)

    # ---- who and where

    @property
    def name(self) -> str | None:
        """The run's name."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The run's version or id. Before a run, with a `save_dir`: the given or the next free one; else None."""
        if self._version is None and self._run_dir is None and self.runs_dir is not None:
            return next_version(self.runs_dir)
        return self._version

    @property
    def save_dir(self) -> str | None:
        """The explicit folder, else the run folder; None before `start`."""
        folder = self._save_dir if self._save_dir is not None else self._run_dir
        return None if folder is None else str(folder)

    @property
    def log_dir(self) -> str | None:
        """The folder this logger writes into; before a run that of `version`, and None without a `save_dir`."""
        if self._log_dir is None and self._run_dir is None and self.runs_dir is not None and self.version is not None:
            return str(self._within(self.runs_dir / folder_name(self.version)))
        return None if self._log_dir is None else str(self._log_dir)

    @property
    def root_dir(self) -> str | None:
        """The folder that has one folder per run; without a `save_dir` the run folder."""
        return self.save_dir if self.runs_dir is None else str(self.runs_dir)

    def _within(self, folder: Path) -> Path:
        """Return where in the run's folder this logger writes."""
        return folder

    @property
    def runs_dir(self) -> Path | None:
        """The folder with one folder per run, `<save_dir>/<name>`; None without `save_dir` or with `_OWN_FOLDERS`."""
        if self._save_dir is None or self._OWN_FOLDERS:
            return None
        return self._save_dir / self._name if self._name else self._save_dir

    @property
    def asked_folder(self) -> str | None:
        """The run folder's name in `runs_dir` that the user asked for by `version`; None leaves it open."""
        return None if self._given_version is None else folder_name(self._given_version)

    @property
    def last_folder(self) -> str | None:
        """The run folder's name in `runs_dir` that this logger wrote into last, else `asked_folder`."""
        return None if self._version is None else folder_name(self._version)

    @property
    def experiment(self) -> Any:
        """The tracker's real object, for what this class has no method for; opened on first use, before a run too.

        On ranks that do not write, every method of it does nothing.
        """
        if not self._opened() or self._delivery is None:
            return NoExperiment()
        if self._delivery.is_begun:
            try:
                return self._delivery.ask(self._experiment, self._flush_timeout_s)
            except TimeoutError as error:
                warn_user(str(error))
        else:
            warn_user(f"{type(self).__name__} is not open yet: what `experiment` is given now is lost")
        return NoExperiment()

    # ---- the public methods

    def start(self, run_dir: PathLike, is_main: bool = True) -> None:
        """Open the logger and write what was kept.

        Called by the Trainer at the start of fit, validate, test and predict, after `load_state_dict`. Does nothing if
        the logger is open in that folder already.

        Args:
            run_dir: the run folder, used unless the logger has a `save_dir`.
            is_main: True on the main process; elsewhere the logger stays closed and swallows its records, unless
                `per_rank`.

        Raises:
            InstepError: the logger cannot be opened with these settings. A tracker that cannot be reached is no error:
                it is tried again while the run goes on.
        """
        run_dir, early = Path(run_dir), self._early
        self._early = False
        if self._open and (self._run_dir == run_dir or (early and self._stays(run_dir))):
            self._run_dir = run_dir
            return
        if early:
            self._earlier = self._log_dir
        if self._open:
            self.finalize("success")
        self._is_main = is_main
        self._run_dir = run_dir
        if self._per_rank and not is_main:
            from instep.state import read_environment  # late: it loads torch, which a logger alone does not need

            self._rank = read_environment().rank
        self._is_main = is_main or self._per_rank
        if not self._is_main:
            self._kept = None
            return
        self._reopen()

    def attach(self, claim: Callable[[], Path], decides: bool = False, number: int = 0) -> None:
        """Say where the next run will write, for what is written before it. Called by the Trainer.

        Args:
            claim: makes the run folder, if it is not there yet, and returns it.
            decides: the run folder stands in this logger's `runs_dir`.
            number: index of this logger among the run's loggers of its class.
        """
        self._claim, self._decides, self._number = claim, decides, number

    def take_up(self, version: int | str | None, number: int, rank: int, status: str) -> None:
        """Send what waits of a run that is over, from the next start on. Called by `instep runs sync`.

        Args:
            version: of the run.
            number: index of this logger among the run's loggers of its class.
            rank: of the process that wrote.
            status: how the run ended.
        """
        self._version, self._number, self._rank, self.status = version, number, rank, status
        self._resumed = self._sends_rest = True

    def follow(self, folder: str) -> None:
        """Write into this folder of `runs_dir` from the next start on: the run's. Called by the Trainer."""
        self._version = version_of(folder)

    def begin_anew(self) -> None:
        """Write into a folder of `runs_dir` that no other run has, from the next start on. Called by the Trainer."""
        if self.runs_dir is None or self._early:
            return
        self._version = self._given_version
        if self._version is not None and not is_free(taken := self.runs_dir / folder_name(self._version)):
            self._version = next_version(self.runs_dir)
            new = self.runs_dir / folder_name(self._version)
            warn_user(f"{taken} is taken: it has the files of another run. {type(self).__name__} writes into {new}")

    def discard(self) -> None:
        """Take back what was written before a run: the ranks that are about to start do all of it again."""
        self._kept = None
        if self._early:
            self.finalize("success")
            self._discard()
            self._early, self._run_dir, self._log_dir, self._version = False, None, None, self._given_version

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: numbers by name. A 0-dim tensor is turned into one, which waits for its device; of a dict each
                entry is one, under both names joined by "/".
            step: the global step, in optimizer steps. None: the one after the last.

        Raises:
            LogError: a value is not a number.
        """
        if not self._is_main:
            return
        plain = dict(metrics)
        if step is None:
            step = self._last_step + 1
        for name, value in metrics.items():
            if type(value) is dict:
                del plain[name]
                plain |= {f"{name}/{part}": self._number_of(f"{name}/{part}", one) for part, one in value.items()}
            elif type(value) is not float and type(value) is not int:
                plain[name] = self._number_of(name, value)
        x = step if self._x_axis == "step" else self._place(plain, step)
        if self._prefix or type(self)._sent_name is not Logger._sent_name:
            sent = {name: self._sent_name(self._prefix + name) for name in plain}
            plain = {sent[name]: value for name, value in plain.items()}
            if len(plain) < len(sent):
                alike = [name for name, there in sent.items() if [*sent.values()].count(there) > 1]
                warn_user(
                    f"{type(self).__name__} allows only one name for {', '.join(alike)}, so the last of their values "
                    "takes the place of the others. Log them under names that differ in letters or digits."
                )
        if step > self._last_step:
            self._last_step = step
        self._put("_log_metrics", plain, x, step=step)

    def log(self, kind: str, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Record values of any kind by name; `log_image`, `log_table` and so on call it.

        Args:
            kind: "metrics", "text", "image", "audio", "video", "figure", "histogram" or "table".
            values: by name, as the method of the kind takes them.
            step: the global step. None: that of the run, else the last one.
            **options: of the kind, such as `sample_rate`.

        Raises:
            LogError: a value is not of its kind.
        """
        if kind == "metrics":
            self.log_metrics(values, step)
            return
        from instep.loggers.kinds import MAKERS  # late: it loads NumPy

        if kind not in MAKERS:
            raise one_of("kind", kind, ("metrics", *MAKERS))
        if self._is_main and self._takes(kind):
            step = self._step_now() if step is None else step
            x = step if self._x_axis == "step" else self._place({}, step)
            for name, value in values.items():
                plain = MAKERS[kind](name, value, **options)
                self._put(_hook(kind), self._sent_name(self._prefix + name), plain, x, step=step)

    def _step_now(self) -> int:
        if self.step_of_run is not None and self._delivery is not None:
            return self.step_of_run()
        return max(self._last_step, 0)

    _that_take: Callable[[str], list[str]]
    """Lists the loggers that have a place for a kind; set by the package, which knows their names."""

    @classmethod
    def takes(cls, kind: str) -> bool:
        """Return whether the logger has a place for a kind, such as "image"."""
        return getattr(cls, _hook(kind)) is not getattr(Logger, _hook(kind))

    @property
    def _takes_rows(self) -> bool:
        first = next(kind for kind in type(self).__mro__ if {"_log_rows", "_log_metrics"} & vars(kind).keys())
        return first is not Logger and "_log_rows" in vars(first)

    def _takes(self, kind: str) -> bool:
        if self.takes(kind):
            return True
        if kind not in self._refused:
            self._refused |= {kind}
            others = ", ".join(self._that_take(kind))
            warn_user(f"{type(self).__name__} has no place for {kind}: it is left out. These have one: {others}")
        return False

    def log_text(
        self,
        key: str | Mapping[str, str],
        text: str | None = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
        data: Iterable[Sequence[Any]] | None = None,
        dataframe: Any = None,
    ) -> None:
        """Record texts, such as samples of what a model says.

        Args:
            key: the text's name, or texts by name.
            text: the text.
            step: the global step. None: that of the run, else the last one.
            columns: column names of a table of texts, as in `log_table`.
            data: its rows.
            dataframe: in the place of both.
        """
        if columns is not None or data is not None or dataframe is not None:
            self.log("table", {str(key): None}, step, columns=columns, data=data, dataframe=dataframe)
        else:
            self.log("text", key if isinstance(key, Mapping) else {key: text}, step)

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record one picture or several under a name.

        Args:
            key: their name.
            images: one or a list of: tensors of shape (channels, height, width), floats in 0 to 1 or integers in 0 to
                255; arrays of that shape or (height, width, channels); PIL images; paths. Or a batch of 4 dimensions.
            step: the global step. None: that of the run, else the last one.
            **kwargs: `caption`, one text or a list of them.
        """
        self.log("image", {key: images}, step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record pictures by name, each as `log_image` takes them."""
        self.log("image", values, step, **kwargs)

    def log_audio(self, key: str, audios: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record sounds.

        Args:
            key: their name.
            audios: one or a list of: floats in -1 to 1 of shape (samples,), (samples, channels) or (channels, samples).
            step: the global step. None: that of the run, else the last one.
            **kwargs: `sample_rate`, 44,100 unless given, and `caption`; one value or a list of them.
        """
        self.log("audio", {key: audios}, step, **kwargs)

    def log_video(self, key: str, videos: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record videos.

        Args:
            key: their name.
            videos: one or a list of tensors or arrays of shape (frames, channels, height, width).
            step: the global step. None: that of the run, else the last one.
            **kwargs: `fps`, frames a second, 4 unless given, and `caption`; one value or a list of them.
        """
        self.log("video", {key: videos}, step, **kwargs)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Record a matplotlib figure as a picture, and close it unless told otherwise."""
        self.log("figure", {key: figure}, step, close=close)

    def log_histogram(self, key: str, values: Any, step: int | None = None, bins: int = 64) -> None:
        """Record how the finite values of a tensor or array are distributed; or a pair of counts and edges."""
        self.log("histogram", {key: values}, step, bins=bins)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Iterable[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record a table: column names and rows, or a pandas-like dataframe."""
        self.log("table", {key: None}, step, columns=columns, data=data, dataframe=dataframe)

    def log_artifact(self, path: PathLike, name: str | None = None, type: str = "file") -> None:
        """Keep a file or folder with the run; it is read when its turn comes, and must be there still.

        Args:
            path: of the file or folder.
            name: None for that of the path.
            type: such as "model" or "dataset".
        """
        if self._is_main and self._takes("artifact"):
            from instep.loggers.kinds import Artifact  # late: it loads NumPy

            self._put("_log_artifact", Artifact(local_path(path).absolute(), name or Path(path).name, type))

    def log_code(self, folder: PathLike | None = None) -> None:
        """Record the git commit, what is not committed, and the script's path.

        Args:
            folder: in the git repository. None: the working directory.
        """
        if self._is_main:
            from instep.loggers.kinds import code_state  # late: it loads NumPy

            self._put("_log_code", code_state(None if folder is None else local_path(folder)))

    def log_hyperparams(
        self, params: Any = None, metrics: Mapping[str, float] | float | None = None, step: int | None = None
    ) -> None:
        """Record hyperparameters.

        Args:
            params: a mapping, Namespace, dataclass or OmegaConf container, nested as you like; values that the logger
                cannot hold are written as text.
            metrics: numbers to stand beside them, where the logger has a place for that; one number alone is named
                "hp_metric".
            step: the global step of these metrics. None: the last one.

        Raises:
            UsageError: `params` has no names.
        """
        plain = {} if params is None else plain_values(params)
        if not isinstance(plain, dict):
            raise UsageError(
                f"{type(self).__name__}.log_hyperparams got a {type(params).__name__}. Give a dict, Namespace, "
                "dataclass or OmegaConf container."
            )
        if not self._is_main:
            return
        numbers = None
        if metrics is not None:
            named = metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}
            numbers = {name: self._number_of(name, value) for name, value in named.items()}
        from instep.loggers.hparams import plain as as_json  # late: not every run has hyperparameters

        if step is not None:
            self._last_step = max(self._last_step, step)
        self._put("_log_hyperparams", as_json(plain), numbers, step=max(self._last_step, 0))

    def log_graph(self, module: Module, example_input: Any = None) -> None:
        """Record the model's graph, where the logger has a place for that; waits for it."""
        if self._is_main and self._takes("graph"):
            self._at_once(lambda: self._log_graph(module, example_input))

    def watch(self, module: Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Let the tracker's own package watch a module while it trains, where it can.

        Args:
            module: the model.
            log: "gradients", "parameters", "all" or None.
            log_freq: backward passes between two records.
            log_graph: record the graph too.
        """
        if self._is_main and self._takes("watch"):
            self._at_once(lambda: self._log_watch(module, log, log_freq, log_graph))

    def after_save_checkpoint(self, path: Location) -> None:
        """Take note of a checkpoint that was committed at this path; with `log_model="all"` send it."""
        if self._is_main:
            if self._open and type(self)._after_save_checkpoint is not Logger._after_save_checkpoint:
                self._at_once(lambda: self._after_save_checkpoint(to_path(path)))  # later it may be deleted
            elif not self._open:
                self._put("_after_save_checkpoint", to_path(path))
            if self.log_model == "all":
                self.log_checkpoint(path)

    def log_checkpoint(self, path: Location, aliases: Sequence[str] = ()) -> None:
        """Keep a checkpoint with the run.

        Args:
            path: of the checkpoint's folder or file.
            aliases: names that it has in the tracker beside its own, such as "best".
        """
        if self._is_main and (self.takes("checkpoint") or self._takes("artifact")):
            self._put("_log_checkpoint", to_path(path), list(aliases))

    def save(self) -> None:
        """Bring everything recorded so far to the tracker, or else to the disk."""
        if self._open or (self._waits and self._opened()):
            self._flush(self._flush_timeout_s)

    def finalize(self, status: str = "success") -> None:
        """Close the logger; a second call does nothing.

        Args:
            status: "success", "interrupted" or "failed".
        """
        if self._waits:
            self._opened()
        if self._open and self._delivery is not None:
            self._open, self.status = False, status  # first: a failing close is not tried again
            delivery, self._delivery = self._delivery, None
            delivery.close(lambda: self._finalize(status), self._flush_timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to append instead of starting anew: JSON values.

        Flushes first, so that a checkpoint never knows more than the files do.
        """
        if self._open:
            self._flush(_CHECKPOINT_WAIT_S)
        state: dict[str, Any] = {"version": self._version, "step": self._last_step, "logged": dict(self._logged or {})}
        if self._x_axis == "time":
            state["began_s"] = self._began_s
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the run of this state, from the next `start` on; an open logger is closed first.

        Args:
            state_dict: what `state_dict` gave; `global_step` beside it says where the checkpoint was saved, for what
                was logged at that step but after the save, such as a test's result: it is kept.

        Raises:
            CorruptCheckpointError: its version leads out of the folder of logs.
        """
        if self._open:
            self.finalize("success")
        if self._early:
            self._early, self._earlier, self._version = False, self._log_dir, self._given_version
        if self._version is None:
            version = state_dict.get("version")
            kind = type(self).__name__
            from instep.loggers.trust import is_version  # late: a new run does not need it

            if not is_version(version):
                raise CorruptCheckpointError(
                    f"the checkpoint's {kind} has the version {version!r}, which is no name of a folder. Give "
                    f"version=... to {kind}, or resume with Resume(loggers=False)."
                )
            self._version = version
        self._last_step = max(state_dict.get("step", -1), state_dict.get("global_step", -1))
        logged = state_dict.get("logged")
        self._logged = dict(logged) if isinstance(logged, dict) else {}
        self._began_s = float(state_dict.get("began_s", 0.0))
        self._resumed = True

    # ---- the hooks, all optional

    def _start(self) -> None:
        """Open files or connections; `self._log_dir` is known, its folder not made yet."""

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write plain numbers."""

    def _log_rows(self, rows: list[Row]) -> None:
        """Write several rows at once, in the place of `_log_metrics`: all or none of them."""

    def _log_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        """Write pictures, figures among them."""

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        """Write sounds."""

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        """Write videos."""

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Write a histogram."""

    def _log_table(self, name: str, table: Table, step: int) -> None:
        """Write a table."""

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Write hyperparameters, which are JSON values."""

    def _log_graph(self, module: Module, example_input: Any) -> None:
        """Write the model's graph."""

    def _log_watch(self, module: Module, log: str | None, log_freq: int, log_graph: bool) -> None:
        """Watch a module."""

    def _log_artifact(self, artifact: Artifact) -> None:
        """Keep a file or folder."""

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        """Keep a checkpoint: by default an artifact of the type "model"."""
        from instep.loggers.kinds import Artifact  # late: it loads NumPy

        self._log_artifact(Artifact(path, path.name, "model"))

    def _log_code(self, code: Code) -> None:
        """Keep the state of the program: by default `git.json` and `git.patch` in the folder of logs."""
        if self._log_dir is not None:
            from instep.loggers.kinds import write_code  # late: it loads NumPy

            write_code(code, self._log_dir)

    def _after_save_checkpoint(self, path: Path) -> None:
        """Take note of a committed checkpoint."""

    def _save(self) -> None:
        """Flush."""

    def _finalize(self, status: str) -> None:
        """Close what `_start` opened."""

    def _delivered(self) -> Mapping[str, int] | None:
        """Return the last step that the tracker has of each metric; None where it cannot be asked.

        Called after `_start` of a resumed run, and after a failure of a logger that is not `_LOCAL`.
        """
        return None

    def _kept_rows(self) -> Iterable[RowKey]:
        """Return the rows of a file that `_start` has kept of what came after the checkpoint."""
        return ()

    def _sync_arguments(self) -> dict[str, Any]:
        """Return what `instep runs sync` gives to the constructor: `_SYNC`."""
        return {name: getattr(self, f"_{name}", None) for name in self._SYNC}

    def _due(self, first: Record, last: Record) -> bool:
        """Return True if the few records from the first to the last are to be written now, not with later ones."""
        return True

    def _row_count(self) -> int | None:
        """Return how many rows the file has, to which each record adds one; None where there is no such file."""
        return None

    def _holds(self, record: Record) -> bool:
        """Return True if the files have a record that an earlier process left as one that waits. After `_start`."""
        front, others = self._had_rows
        return record.row is not None and (record.row < front or record.row in others)

    def _sent_name(self, name: str) -> str:
        """Return the name that the tracker allows for a name; the same for the same."""
        return name

    def _experiment(self) -> Any:
        """Return what `experiment` shows."""
        return self

    def _discard(self) -> None:
        """Delete what was written before the run; after `_finalize`."""
        if self._fresh and self._log_dir is not None:
            rmtree(self._log_dir, ignore_errors=True)
            with suppress(OSError):  # others write there too
                self._log_dir.parent.rmdir()  # of a sub_dir, the run folder

    # ---- the books

    @property
    def _waits(self) -> bool:
        """Whether something is kept for a run that has not begun."""
        return bool(self._kept) and self._run_dir is None

    def _opened(self) -> bool:
        """Open the logger where it is closed, outside a run too; return whether this process writes."""
        if not self._open and self._is_main and self._run_dir is None and self._is_main_here():
            self._open_early()
        elif not self._open and self._is_main and self._run_dir is not None:
            self._reopen()  # the run is over but its logger is still used
            self._close_at_exit()
        return self._open

    def _open_early(self) -> None:
        if self._decides or self._save_dir is None:
            self._run_dir = make_next(Path.cwd() / RUNS) if self._claim is None else self._claim()
        elif self.runs_dir is None:
            self._run_dir = self._save_dir
        elif self._version is None:
            self._run_dir = make_next(self.runs_dir)
        else:
            self._run_dir = self.runs_dir / folder_name(self._version)
            self._among_others = self._run_dir.exists() and any(self._run_dir.iterdir())
        folder = self._choose_log_dir(self._run_dir)
        self._fresh = not folder.exists() or not any(folder.iterdir())
        self._early = True
        self._reopen()
        self._close_at_exit()

    @property
    def early_folder(self) -> Path | None:
        """The run folder that the logger has taken before a run; None where it has not, or another one has its own."""
        taken = self._save_dir is None or (self.runs_dir is not None and not self._among_others)
        return self._run_dir if self._early and taken else None

    def _stays(self, run_dir: Path) -> bool:
        """Return whether a logger that was opened before the run writes into the same folder in it."""
        return self._log_dir is not None and self._choose_log_dir(run_dir).absolute() == self._log_dir.absolute()

    def _is_main_here(self) -> bool:
        """Return whether this process will be the main one of a run, by its launcher's environment."""
        from instep.state import read_environment  # late: it loads torch, which a logger alone does not need

        self._is_main = read_environment().rank == 0
        return self._is_main

    def _close_at_exit(self) -> None:
        atexit.unregister(self.finalize)
        atexit.register(self.finalize, "success")  # last: it runs before the end of the package that it writes with

    def _put(self, hook: str, *args: Any, step: int | None = None) -> None:
        """Give one call of a hook to the delivery thread, or keep it until there is one."""
        call = (hook, args, step, time.time())
        if self._delivery is None and (
            self._run_dir is not None or (self.runs_dir is not None and self._claim is None)
        ):
            self._opened()  # after a run; or by hand: no Trainer is to say where
        if self._delivery is not None:
            self._send(self._delivery, call)
        elif self._kept is not None:
            self._kept.append(call)
        elif self._is_main_here():
            self._kept = [call]
            self._close_at_exit()

    def _send(self, delivery: Delivery, call: _Call) -> None:
        record = delivery.put(*call)
        if record.step is not None and self._logged is not None:
            self._logged.update(dict.fromkeys(record.names(), record.step))

    def _at_once(self, call: Callable[[], Any]) -> None:
        """Run a call that needs the live module, once all earlier records were sent, and wait for its end."""
        if not self._opened() or self._delivery is None:
            return
        if not self._delivery.is_begun:
            warn_user(f"{type(self).__name__} is not open yet: what needs the model itself is left out")
            return
        try:
            self._delivery.ask(call, self._flush_timeout_s, after_all=True)
        except InstepError:
            raise
        except Exception as error:  # noqa: BLE001  a tracker never ends a run
            warn_user(f"{type(self).__name__} failed: {type(error).__name__}: {error}")

    def _flush(self, timeout_s: float) -> None:
        assert self._delivery is not None
        if self._delivery.flush(timeout_s, early=True):
            try:
                self._delivery.ask(self._save, timeout_s)
            except Exception as error:  # noqa: BLE001  a tracker never ends a run
                warn_user(f"{type(self).__name__} could not flush: {type(error).__name__}: {error}")

    def _place(self, metrics: Mapping[str, float], step: int) -> int:
        """Return the place on an x-axis that is not the step: that of the last record that had one."""
        if self._x_axis == "time":
            self._x = time.time() - self._began_s if self._began_s else 0.0
        else:
            self._x = metrics.get(self._x_axis, self._x)
        if self._x is None and metrics and not self._lacks_x:
            self._lacks_x = True
            warn_user(
                f"{type(self).__name__}(x_axis={self._x_axis!r}): there is no metric of that name yet; what is logged "
                "before it is drawn over the steps"
            )
        return int(step if self._x is None else self._x)

    def _reopen(self) -> None:
        # Late: a Trainer without loggers does not need them.
        from instep.loggers.backlog import Backlog
        from instep.loggers.delivery import Delivery, LoggerSide, Marks, close_in_forks

        assert self._run_dir is not None
        self._log_dir = self._rest_dir or self._choose_log_dir(self._run_dir)
        if self._rank and self._rest_dir is None:
            self._log_dir /= f"rank-{self._rank}"
        earlier, self._earlier = self._earlier, None
        if earlier is not None and earlier.absolute() != self._log_dir.absolute():
            warn_user(f"{type(self).__name__} wrote into {earlier} before the run, which goes on in {self._log_dir}")
        self._began_s = self._began_s or time.time()
        self._logged = {} if self._logged is None else self._logged
        is_new = not self._resumed
        if self._resumed or self._marks is None:
            at_checkpoint = dict(self._logged) if self._resumed and not self._sends_rest else None
            self._marks = Marks(at_checkpoint, exact=self._LOCAL)
        number, rank = (f"-{self._number + 1}" * (self._number > 0), f"-rank-{self._rank}" * (self._rank > 0))
        folder = self._run_dir.absolute() / "loggers"
        backlog = Backlog(folder / f"{type(self).__name__}{number}{rank}.jsonl")
        self._delivery = Delivery(LoggerSide(self, backlog, self._marks), type(self).__name__, backlog)
        try:
            self._delivery.begin(self._start_timeout_s)
        except BaseException:
            self._delivery = None
            raise
        self._open = True
        close_in_forks(self)
        kept, self._kept = self._kept, None
        for call in kept or ():
            self._send(self._delivery, call)
        if self._save_code and is_new:
            self.log_code()

    def _choose_log_dir(self, run_dir: Path) -> Path:
        parent = self.runs_dir
        if parent is None:
            return run_dir
        if run_dir.absolute().parent == parent.absolute() and self.asked_folder in (None, run_dir.name):
            self.follow(run_dir.name)  # one run, one folder
            return run_dir
        if self._version is None:
            self._version = next_version(parent)
        return parent / folder_name(self._version)

    def _error(self, doing: str, error: Exception) -> InstepError:
        if isinstance(error, InstepError):
            return error
        return InstepError(
            f"{type(self).__name__} failed in {doing}: {type(error).__name__}: {str(error).rstrip('.')}. "
            f"It writes into {self.log_dir!r}. Repair the cause, or leave this logger out of Trainer(logger=...)."
        )

    def _number_of(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LogError(
                f"{type(self).__name__}: the metric {name!r} must be a number, "
                f"got {type(value).__name__}: {repr(value)[:80]}. "
                "Log one scalar per name; texts and settings go to log_hyperparams."
            ) from error


def _hook(kind: str) -> str:
    return f"_log_{'image' if kind == 'figure' else kind}"
