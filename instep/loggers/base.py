"""The base class of loggers: it queues what is logged, and a subclass writes it in the logger's own thread."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from instep.errors import LogError, SettingError, UsageError, one_of
from instep.loggers.folders import folder_name, next_version
from instep.types import Location, PathLike
from instep.utils.checks import FLAG, PATH, TEXT, above_zero
from instep.utils.hparams import plain_values
from instep.utils.imports import check_installed
from instep.utils.paths import local_path, to_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.nn import Module

    from instep.loggers.appended import OutputFile
    from instep.loggers.backlog import Row
    from instep.loggers.delivery import Delivery
    from instep.loggers.kinds import Artifact, Audio, Code, Histogram, Image, Table, Video

T = TypeVar("T")

_MOST_TIMEOUT_S = 1e9  # 30 years in seconds, since locks of the system do not accept infinity
_OPTIONS = ("save_dir", "name", "version", "prefix", "x_axis", "log_model", "save_code", "per_rank", "flush_timeout_s")


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the arguments of `Logger` from a subclass's arguments, whose rest its package gets."""
    return {name: arguments.pop(name) for name in _OPTIONS if name in arguments}


def numbered(name: str, values: Sequence[T]) -> list[tuple[str, T]]:
    """Give each of several values a name, `<name>/<i>`; a single value keeps the name."""
    return [(name if len(values) == 1 else f"{name}/{i}", value) for i, value in enumerate(values)]


class NoExperiment:
    """Stand-in for the experiment of a logger that writes nothing: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logger:
    """Base of loggers, which write a run's metrics, hyperparameters, pictures, files and so on.

    The public methods may be called at any time and on any rank; only the main process writes, unless `per_rank` is
    set. They put records into a queue. The logger's own thread calls the hooks of the subclass, in order, so a slow
    tracker delays no step. If a hook raises, the run continues: a warning is given, and the record is tried again after
    a pause. Records that do not fit into memory, or have not arrived at the end, wait in
    `<run>/loggers/<logger>.jsonl`, which `instep runs sync` sends. `save`, `finalize` and a checkpoint send what waits.

    What comes before a run waits in memory and is written at its start, or by `save`, `finalize` and the program's end
    where no run starts. With a `save_dir`, and no Trainer that has the logger, it opens at once; `experiment` opens it
    too. A call after `finalize` opens the logger again.

    A subclass overrides hooks: `_start`, `_log_metrics`, `_log_hyperparams`, `_log_text`, `_log_image` and so on, as
    below. They run while the logger is open, with plain values. Values for which a subclass has no hook are left out,
    with one warning.

    A logger writes into `log_dir`: the run folder, or, with a `save_dir`, `<save_dir>/<name>/<version>`, where the
    version is the next free `version_N` unless given. The folder of the first logger with a `save_dir` becomes the run
    folder, with the checkpoints, and loggers of the same `save_dir` and `name` write there too. A logger that is opened
    before a run uses the folder that the run is expected to have. If the run then uses another folder (it is resumed,
    or has another `default_root_dir`), earlier files stay where they are, with a warning.

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
        A complete logger, which writes a file in the run folder:

        >>> import tempfile
        >>> from pathlib import Path
        >>> class LinesLogger(Logger):
        ...     def _start(self):
        ...         Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        ...         self.file = Path(self.log_dir, "lines.txt").open("a")
        ...
        ...     def _log_metrics(self, metrics, step):
        ...         self.file.write(f"{step} {metrics}\\n")
        ...
        ...     def _save(self):
        ...         self.file.flush()
        ...
        ...     def _finalize(self, status):
        ...         self.file.close()
        >>> with tempfile.TemporaryDirectory() as folder:  # by hand; a Trainer takes Trainer(logger=LinesLogger())
        ...     logger = LinesLogger(folder, version="first")
        ...     logger.log_metrics({"loss": 0.5}, step=10)
        ...     logger.finalize()
        ...     print(Path(logger.log_dir, "lines.txt").read_text().strip())
        10 {'loss': 0.5}
    """

    # Defaults on the class, so that a subclass that forgets `super().__init__()` still works.
    _save_dir: Path | None = None
    _name: str | None = None
    _given_version: int | str | None = None
    _prefix: str = ""
    _sub_dir: str | None = None  # a folder below the run's folder
    _file: OutputFile | None = None  # set by a logger that writes a file
    _refused: frozenset[str] = frozenset()  # kinds without a hook that were logged; each was warned of once
    _tracker: Any = None  # object of the tracker's package that `experiment` returns; exists while the logger is open
    # further attributes of a subclass that exist only while the logger is open
    _writers: AbstractSet[str] = frozenset()
    _draws_graph: bool = False  # True if the Trainer should call `log_graph` at the start of fit
    _x_axis: str = "step"
    log_model: bool | str = False
    _save_code: bool = False
    _per_rank: bool = False
    _flush_timeout_s: float = 30.0
    _start_timeout_s: float = 60.0  # seconds; a tracker that takes longer to open continues while the run starts

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
        for given in unknown:  # raised here, since Python's own error would not name the class and the nearest argument
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
        self._given_version = version
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
        # A copy is closed; it opens its own writer.
        return {**self.__dict__, **dict.fromkeys({"_tracker", *self._writers} & self.__dict__.keys())}

    @classmethod
    def check_installed(cls) -> None:
        """Raise if the tracker's package is missing.

        Raises:
            MissingPackageError: the package is missing; the text has the `pip install`.
        """
        if cls._NEEDS is not None:
            package, extra = cls._NEEDS
            check_installed(package, extra=extra, purpose=cls.__name__)

    @cached_property
    def delivery(self) -> Delivery:
        """Delivery of the records to the tracker: the folder of each run, the waiting records, and the thread."""
        from instep.loggers.appended import OutputFile  # imported late: a Trainer without loggers does not need them
        from instep.loggers.delivery import Delivery, Writer

        kind = type(self)
        of_metrics = next(base for base in kind.__mro__ if {"_log_rows", "_log_metrics"} & vars(base).keys())
        writer = Writer(
            kind=kind,
            save_dir=self._save_dir,
            base=self.runs_dir,
            asked=None if self._given_version is None else folder_name(self._given_version),
            sub_dir=self._sub_dir,
            is_local=self._LOCAL,
            owns_folders=self._OWN_FOLDERS,
            per_rank=self._per_rank,
            x_axis=self._x_axis,
            start_timeout_s=self._start_timeout_s,
            flush_timeout_s=self._flush_timeout_s,
            file=self._file or OutputFile(),
            takes_many=of_metrics is not Logger and "_log_rows" in vars(of_metrics),
            hook=partial(getattr, self),
            finalize=self.finalize,
            code=self.log_code if self._save_code else None,
            arguments=partial(_sync_arguments, self),
        )
        return Delivery(writer, self._given_version)

    # ---- who and where

    @property
    def name(self) -> str | None:
        """The run's name."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The run's version or id. Before a run, with a `save_dir`: the given or the next free one; else None."""
        version, base = self.delivery.version, self.runs_dir
        if version is None and base is not None and self.delivery.run_dir is None:
            return next_version(base)
        return version

    @property
    def save_dir(self) -> str | None:
        """The explicit folder, else the run folder; None before a run."""
        folder = self._save_dir if self._save_dir is not None else self.delivery.run_dir
        return None if folder is None else str(folder)

    @property
    def log_dir(self) -> str | None:
        """The folder this logger writes into; before a run, the folder of `version`, or None without a `save_dir`."""
        folder = self.delivery.log_dir
        if folder is None and self.delivery.run_dir is None and self.runs_dir is not None and self.version is not None:
            folder = self.runs_dir / folder_name(self.version) / (self._sub_dir or "")
        return None if folder is None else str(folder)

    @property
    def root_dir(self) -> str | None:
        """The folder that has one folder per run; without a `save_dir` the run folder."""
        return self.save_dir if self.runs_dir is None else str(self.runs_dir)

    @property
    def runs_dir(self) -> Path | None:
        """The folder with one folder per run, `<save_dir>/<name>`; None without `save_dir` or with `_OWN_FOLDERS`."""
        if self._save_dir is None or self._OWN_FOLDERS:
            return None
        return self._save_dir / self._name if self._name else self._save_dir

    @property
    def experiment(self) -> Any:
        """The tracker's own object, for functions that this class lacks; opened on first use, also before a run.

        On ranks that do not write, every method of it does nothing.
        """
        found = self.delivery.ask(self._experiment, after_all=False)
        return NoExperiment() if found is None else found

    # ---- the public methods

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: numbers by name. A 0-dim tensor is turned into a number, which waits for its device. Each entry of
                a nested dict is a metric, and its name is both names joined by "/".
            step: the global step, in optimizer steps. None: the step after the last one.

        Raises:
            LogError: a value is not a number.
        """
        delivery = self.delivery
        if not delivery.is_main:
            return
        plain, at = dict(metrics), delivery.last_step + 1 if step is None else step
        for name, value in metrics.items():
            if type(value) is dict:
                del plain[name]
                plain |= {f"{name}/{part}": _number_of(self, f"{name}/{part}", one) for part, one in value.items()}
            elif type(value) is not float and type(value) is not int:
                plain[name] = _number_of(self, name, value)
        x = delivery.place(plain, at)
        if self._prefix or type(self)._sent_name is not Logger._sent_name:
            sent = {name: self._sent_name(self._prefix + name) for name in plain}
            plain = {sent[name]: value for name, value in plain.items()}
            if len(plain) < len(sent):
                alike = [name for name, there in sent.items() if [*sent.values()].count(there) > 1]
                warn_user(
                    f"{type(self).__name__} allows only one name for {', '.join(alike)}, so the last of their values "
                    "takes the place of the others. Log them under names that differ in letters or digits."
                )
        if at > delivery.last_step:
            delivery.last_step = at
        delivery.put("_log_metrics", (plain, x), at)

    def log(self, kind: str, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Record values of any kind by name; `log_image`, `log_table` and so on call it.

        Args:
            kind: "metrics", "text", "image", "audio", "video", "figure", "histogram" or "table".
            values: the values by name, as the method of the kind (`log_image`, ...) takes them.
            step: the global step. None: that of the run, else the last one.
            **options: options of the kind, such as `sample_rate`.

        Raises:
            LogError: a value is not of its kind.
        """
        if kind == "metrics":
            self.log_metrics(values, step)
            return
        from instep.loggers.kinds import MAKERS  # imported late: it loads NumPy

        if kind not in MAKERS:
            raise one_of("kind", kind, ("metrics", *MAKERS))
        if self.delivery.is_main and _has_place(self, kind):
            step = self.delivery.step_now() if step is None else step
            x = self.delivery.place({}, step)
            for name, value in values.items():
                plain = MAKERS[kind](name, value, **options)
                self.delivery.put(_hook(kind), (self._sent_name(self._prefix + name), plain, x), step)

    def log_text(
        self,
        key: str | Mapping[str, str],
        text: str | None = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
        data: Iterable[Sequence[Any]] | None = None,
        dataframe: Any = None,
    ) -> None:
        """Record texts, such as samples of a model's output.

        Args:
            key: the text's name, or texts by name.
            text: the text.
            step: the global step. None: that of the run, else the last one.
            columns: column names of a table of texts, as in `log_table`.
            data: rows of that table.
            dataframe: a dataframe in place of `columns` and `data`.
        """
        if columns is not None or data is not None or dataframe is not None:
            self.log("table", {str(key): None}, step, columns=columns, data=data, dataframe=dataframe)
        else:
            self.log("text", key if isinstance(key, Mapping) else {key: text}, step)

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record one picture or several under a name.

        Args:
            key: name of the pictures.
            images: one or a list of: tensors of shape (channels, height, width), floats in 0 to 1 or integers in 0 to
                255; arrays of that shape or (height, width, channels); PIL images; paths. Or a batch of 4 dimensions.
            step: the global step. None: that of the run, else the last one.
            **kwargs: `caption`, one text or a list of them.
        """
        self.log("image", {key: images}, step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record pictures by name, each in a form that `log_image` accepts."""
        self.log("image", values, step, **kwargs)

    def log_audio(self, key: str, audios: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record sounds.

        Args:
            key: name of the sounds.
            audios: one or a list of: floats in -1 to 1 of shape (samples,), (samples, channels) or (channels, samples).
            step: the global step. None: that of the run, else the last one.
            **kwargs: `sample_rate`, 44,100 unless given, and `caption`; one value or a list of them.
        """
        self.log("audio", {key: audios}, step, **kwargs)

    def log_video(self, key: str, videos: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record videos.

        Args:
            key: name of the videos.
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
        """Keep a file or folder with the run. The thread reads it later, so it must still exist then.

        Args:
            path: path of the file or folder.
            name: name in the tracker. None: the last part of the path.
            type: kind of the artifact, such as "model" or "dataset".
        """
        if self.delivery.is_main and _has_place(self, "artifact"):
            from instep.loggers.kinds import Artifact  # imported late: it loads NumPy

            artifact = Artifact(local_path(path).absolute(), name or Path(path).name, type)
            self.delivery.put("_log_artifact", (artifact,))

    def log_code(self, folder: PathLike | None = None) -> None:
        """Record the git commit, uncommitted changes, and the script's path.

        Args:
            folder: a folder in the git repository. None: the working directory.
        """
        if self.delivery.is_main:
            from instep.loggers.kinds import code_state  # imported late: it loads NumPy

            self.delivery.put("_log_code", (code_state(None if folder is None else local_path(folder)),))

    def log_hyperparams(
        self, params: Any = None, metrics: Mapping[str, float] | float | None = None, step: int | None = None
    ) -> None:
        """Record hyperparameters.

        Args:
            params: a mapping, Namespace, dataclass or OmegaConf container, nested as you like; values that the logger
                cannot store are written as text.
            metrics: numbers to store beside the hyperparameters, if the logger has a place for them; one number alone
                is named "hp_metric".
            step: the global step of `metrics`. None: the last step.

        Raises:
            UsageError: `params` has no names.
        """
        plain = {} if params is None else plain_values(params)
        if not isinstance(plain, dict):
            raise UsageError(
                f"{type(self).__name__}.log_hyperparams got a {type(params).__name__}. Give a dict, Namespace, "
                "dataclass or OmegaConf container."
            )
        delivery = self.delivery
        if not delivery.is_main:
            return
        numbers = None
        if metrics is not None:
            named = metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}
            numbers = {name: _number_of(self, name, value) for name, value in named.items()}
        from instep.loggers.hparams import plain as as_json  # imported late: not every run has hyperparameters

        if step is not None:
            delivery.last_step = max(delivery.last_step, step)
        delivery.put("_log_hyperparams", (as_json(plain), numbers), max(delivery.last_step, 0))

    def log_graph(self, module: Module, example_input: Any = None) -> None:
        """Record the model's graph, if the logger has a hook for it; wait until it is written."""
        if self.delivery.is_main and _has_place(self, "graph"):
            self.delivery.ask(partial(self._log_graph, module, example_input))

    def watch(self, module: Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Let the tracker's own package watch a module while it trains, if it can.

        Args:
            module: the model.
            log: "gradients", "parameters", "all" or None.
            log_freq: backward passes between two records.
            log_graph: whether to record the model's graph too.
        """
        if self.delivery.is_main and _has_place(self, "watch"):
            self.delivery.ask(partial(self._log_watch, module, log, log_freq, log_graph))

    def after_save_checkpoint(self, path: Location) -> None:
        """Record a checkpoint that was committed at this path; with `log_model="all"` send it."""
        delivery = self.delivery
        if delivery.is_main:
            if not delivery.is_open:
                delivery.put("_after_save_checkpoint", (to_path(path),))
            elif type(self)._after_save_checkpoint is not Logger._after_save_checkpoint:
                # Requested now, since the checkpoint may be deleted later.
                delivery.ask(partial(self._after_save_checkpoint, to_path(path)))
            if self.log_model == "all":
                self.log_checkpoint(path)

    def log_checkpoint(self, path: Location, aliases: Sequence[str] = ()) -> None:
        """Keep a checkpoint with the run.

        Args:
            path: path of the checkpoint's folder or file.
            aliases: further names of the checkpoint in the tracker, such as "best".
        """
        if self.delivery.is_main and (takes(type(self), "checkpoint") or _has_place(self, "artifact")):
            self.delivery.put("_log_checkpoint", (to_path(path), list(aliases)))

    def save(self) -> None:
        """Send everything recorded so far to the tracker, or else write it to the disk."""
        self.delivery.save()

    def finalize(self, status: str = "success") -> None:
        """Close the logger; a second call does nothing. Called at the program's end if nothing else has closed it.

        Args:
            status: "success", "interrupted" or "failed".
        """
        self.delivery.close(status)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values with which a resumed run appends instead of starting again.

        Flushes first, so that the files always hold all that the checkpoint counts as logged.
        """
        return self.delivery.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the run of this state at the next start; an open logger is closed first.

        Args:
            state_dict: result of `state_dict`, with the step of the checkpoint as `global_step`. Values that were
                logged at that step but after the save, such as a test's result, are kept.

        Raises:
            CorruptCheckpointError: the state's version leads out of the folder of logs.
        """
        self.delivery.load_state_dict(state_dict)

    # ---- the hooks, all optional

    def _start(self) -> None:
        """Open files or connections; `self.log_dir` is known, but its folder is not made yet."""

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write plain numbers."""
        from instep.loggers.backlog import Row  # imported late: it loads NumPy

        self._log_rows([Row(metrics, step, self.delivery.time_s)])

    def _log_rows(self, rows: list[Row]) -> None:
        """Write several rows at once instead of calling `_log_metrics` for each: all or none of them."""

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
        from instep.loggers.kinds import Artifact  # imported late: it loads NumPy

        self._log_artifact(Artifact(path, path.name, "model"))

    def _log_code(self, code: Code) -> None:
        """Keep the state of the program: by default `git.json` and `git.patch` in the folder of logs."""
        from instep.loggers.kinds import write_code  # imported late: it loads NumPy

        write_code(code, self.delivery.folder)

    def _after_save_checkpoint(self, path: Path) -> None:
        """Record a committed checkpoint."""

    def _save(self) -> None:
        """Flush to the disk or the tracker."""

    def _finalize(self, status: str) -> None:
        """Close what `_start` opened."""

    def _delivered(self) -> Mapping[str, int] | None:
        """Return the last step that the tracker has of each metric; None if the tracker cannot tell.

        Called after `_start` of a resumed run, and after a failure of a logger that is not `_LOCAL`.
        """
        return None

    def _sent_name(self, name: str) -> str:
        """Return the name that the tracker allows for a metric's name; the same name always gives the same result."""
        return name

    def _experiment(self) -> Any:
        """Return what `experiment` returns: `_tracker`, or the logger itself if a subclass has none."""
        return self if self._tracker is None else self._tracker


def takes(logger: type[Logger], kind: str) -> bool:
    """Return True if a class of loggers has a hook for a kind of value, such as "image"."""
    return getattr(logger, _hook(kind)) is not getattr(Logger, _hook(kind))


def _has_place(logger: Logger, kind: str) -> bool:
    """Return True if a logger has a hook for a kind of value; else warn once, and name the loggers that have one."""
    if takes(type(logger), kind):
        return True
    if kind not in logger._refused:
        logger._refused |= {kind}
        warn_user(
            f"{type(logger).__name__} has no place for {kind}: it is left out. These have one: "
            f"{', '.join(resolve_name('instep.loggers:that_take')(kind))}"
        )
    return False


def _hook(kind: str) -> str:
    return f"_log_{'image' if kind == 'figure' else kind}"


def _sync_arguments(logger: Logger) -> dict[str, Any]:
    return {"name": logger._name, **{name: getattr(logger, f"_{name}", None) for name in logger._SYNC}}


def _number_of(logger: Logger, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LogError(
            f"{type(logger).__name__}: the metric {name!r} must be a number, got {type(value).__name__}: "
            f"{repr(value)[:80]}. Log one scalar per name; texts and settings go to log_hyperparams."
        ) from error
