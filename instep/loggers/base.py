"""`Logger`, the base class of all loggers: it queues records, and a thread passes them to a subclass's hooks."""

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

_MOST_TIMEOUT_S = 1e9  # seconds (30 years): system calls do not accept infinity
_OPTIONS = ("save_dir", "name", "version", "prefix", "x_axis", "log_model", "save_code", "per_rank", "flush_timeout_s")


def take_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of `Logger` from a dict of arguments, and return them; the others are for the tracker."""
    return {name: arguments.pop(name) for name in _OPTIONS if name in arguments}


def numbered(name: str, values: Sequence[T]) -> list[tuple[str, T]]:
    """Return pairs of a name and a value: `<name>/<i>` for each of several values, or `name` for a single one."""
    return [(name if len(values) == 1 else f"{name}/{i}", value) for i, value in enumerate(values)]


class NoExperiment:
    """Object that `experiment` returns on ranks that do not log: every method of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logger:
    """Base class of loggers, which write a run's metrics, hyperparameters, pictures, files and so on.

    The public methods may be called at any time and on any rank, but only the main process writes, unless `per_rank` is
    set. They put records into a queue. The logger's own thread calls the subclass's hooks for the records in order, so
    that a slow tracker delays no step. If a hook raises an error, the run continues: the thread warns, and tries the
    record again after a pause. Records that do not fit into memory, or that are not sent at the end of the run, are
    kept in `<run>/loggers/<logger>.jsonl`, and `instep runs sync` sends them. `save`, `finalize` and a checkpoint send
    the waiting records.

    Records that are logged before a run wait in memory until the run starts. If no run starts, `save`, `finalize` or
    the end of the program writes them. If the logger has a `save_dir` and belongs to no Trainer, the first record opens
    the logger. Reading `experiment`, or a call after `finalize`, opens it too.

    A subclass overrides hooks, which begin with an underscore: `_start`, `_log_metrics`, `_log_hyperparams`,
    `_log_text`, `_log_image` and so on. They are called while the logger is open, with plain values. Values for which a
    subclass has no hook are left out, with one warning.

    A logger writes into `log_dir`: the run folder, or, with a `save_dir`, `<save_dir>/<name>/<version>`. The default
    version is the next free `version_N`. The folder of the first logger with a `save_dir` becomes the run folder, which
    holds the checkpoints too; other loggers with the same `save_dir` and `name` use the same folder. A logger that is
    opened before a run uses the folder that the run is expected to have. If the run then uses another folder (because
    it is resumed, or has another `default_root_dir`), the logger warns, and earlier files stay where they are.

    Args:
        save_dir: parent folder of the run folders; the first logger with a `save_dir` chooses the run folder. None:
            write into the run folder.
        name: name of the run; with `save_dir`, also a folder below `save_dir`.
        version: an int N for the folder `version_N`, or the folder's name; used only with `save_dir`.
        prefix: text to put before every name, joined by "-".
        x_axis: the x-axis of the metrics: "step" (optimizer steps), "epoch", "time" (seconds since the run began) or
            the name of a metric, such as ThroughputMonitor's total of samples or tokens.
        log_model: which checkpoints to send to the tracker: "all": each one when it is saved; "best" or True: the best
            one at the end of fit, or the last one if no metric is monitored.
        save_code: whether to record the git commit, uncommitted changes, and the script's path.
        per_rank: whether every rank writes, into a folder `rank-<n>` or a run of its own.
        flush_timeout_s: longest wait for the tracker at the end of the run, in seconds.

    Raises:
        SettingError: `save_dir` is a URL, or another argument is wrong.
        MissingPackageError: the tracker's package is not installed; the message has the `pip install` command.

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

    # These defaults are set on the class, so that a subclass works even if it does not call `super().__init__()`.
    _save_dir: Path | None = None
    _name: str | None = None
    _given_version: int | str | None = None
    _prefix: str = ""
    _sub_dir: str | None = None  # subfolder of the run's folder to write into
    _file: OutputFile | None = None  # the output file, in a logger that has one
    _refused: frozenset[str] = frozenset()  # kinds of values that were left out, with a warning
    _tracker: Any = None  # the tracker's object that `experiment` returns; None while the logger is closed
    # names of the subclass's attributes that are None while the logger is closed
    _writers: AbstractSet[str] = frozenset()
    _draws_graph: bool = False  # whether the Trainer calls `log_graph` at the start of fit
    _x_axis: str = "step"
    log_model: bool | str = False
    _save_code: bool = False
    _per_rank: bool = False
    _flush_timeout_s: float = 30.0
    _start_timeout_s: float = 60.0  # seconds that the start of a run waits for the tracker to open

    project_argument: str = "name"
    """Name of the constructor's argument that gets the project of `accelerator.init_trackers(project)`."""
    _NEEDS: tuple[str, str | None] | None = None
    """Package that the subclass needs, and instep's extra that installs it."""
    _LOCAL: bool = True
    """Whether a resumed run removes what the subclass wrote after the checkpoint. False: what was sent to the tracker
    stays there, and the resumed run does not send it a second time."""
    _OWN_FOLDERS: bool = False
    """Whether the tracker's package chooses where its runs are stored; such a logger never decides the run folder."""
    _PATHS: Mapping[str, str | None] = {}
    """Names in `_SYNC` whose values are a file, folder or URL, each with an environment variable. `instep runs sync`
    reads the value from the run's note, a JSON file; if another user wrote the note, the variable replaces the value.
    "": there is no such variable. None: the value in another user's note is never used."""
    _HOSTS: Mapping[str, str | None] = {}
    """Names in `_SYNC` whose values name a host but are no URLs, each with an environment variable as in `_PATHS`."""
    _SYNC: tuple[str, ...] = ()
    """Names of constructor arguments that are stored in the run's note, so that `instep runs sync` can make the logger
    again. Each argument is kept in an attribute `_<name>`. A secret must not be among them."""

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
        for given in unknown:  # unlike Python's own error, this error names the class and a similar argument
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
        # A copy of an open logger is closed: it cannot use the tracker's connection.
        return {**self.__dict__, **dict.fromkeys({"_tracker", *self._writers} & self.__dict__.keys())}

    @classmethod
    def check_installed(cls) -> None:
        """Raise an error if the tracker's package is not installed.

        Raises:
            MissingPackageError: the package is missing; the message has the `pip install` command.
        """
        if cls._NEEDS is not None:
            package, extra = cls._NEEDS
            check_installed(package, extra=extra, purpose=cls.__name__)

    @cached_property
    def delivery(self) -> Delivery:
        """The object that sends this logger's records: it has the folder of the run, the queue and the thread."""
        from instep.loggers.appended import OutputFile  # imported late: only needed with a logger
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

    # ---- name, version and folders

    @property
    def name(self) -> str | None:
        """The run's name."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The run's version or id. Before a run: the given version, or the next free one in `save_dir`, or None."""
        version, base = self.delivery.version, self.runs_dir
        if version is None and base is not None and self.delivery.run_dir is None:
            return next_version(base)
        return version

    @property
    def save_dir(self) -> str | None:
        """The argument `save_dir`, or else the run folder; None before a run."""
        folder = self._save_dir if self._save_dir is not None else self.delivery.run_dir
        return None if folder is None else str(folder)

    @property
    def log_dir(self) -> str | None:
        """The folder that this logger writes into. Before a run: the folder of `version` in `save_dir`, or None."""
        folder = self.delivery.log_dir
        if folder is None and self.delivery.run_dir is None and self.runs_dir is not None and self.version is not None:
            folder = self.runs_dir / folder_name(self.version) / (self._sub_dir or "")
        return None if folder is None else str(folder)

    @property
    def root_dir(self) -> str | None:
        """The folder that contains the folders of all runs; without a `save_dir` the run folder."""
        return self.save_dir if self.runs_dir is None else str(self.runs_dir)

    @property
    def runs_dir(self) -> Path | None:
        """The parent folder of the run folders, `<save_dir>/<name>`; None without `save_dir` or with `_OWN_FOLDERS`."""
        if self._save_dir is None or self._OWN_FOLDERS:
            return None
        return self._save_dir / self._name if self._name else self._save_dir

    @property
    def experiment(self) -> Any:
        """The tracker's own object, for functions that this class does not offer. Reading it opens the logger.

        On ranks that do not log, it is an object whose methods all do nothing.
        """
        found = self.delivery.ask(self._experiment, after_all=False)
        return NoExperiment() if found is None else found

    # ---- the public methods

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: numbers by name. A 0-dim tensor is converted to a number, so the call waits for the tensor's
                device. Each entry of a nested dict is a metric whose name is the outer and the inner name, joined by
                "/".
            step: the global step, in optimizer steps. None: the last logged step plus one.

        Raises:
            LogError: a value is not a number.
        """
        delivery = self.delivery
        if not delivery.is_main:
            return
        plain, at = dict(metrics), delivery.last_step + 1 if step is None else int(step)
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
        """Record values of any kind by name; `log_image`, `log_table` and so on call this method.

        Args:
            kind: "metrics", "text", "image", "audio", "video", "figure", "histogram" or "table".
            values: the values by name, in the form that the method for this kind (`log_image`, ...) takes.
            step: the global step. None: the run's current step, or the last logged step if no run is open.
            **options: options for this kind of value, such as `sample_rate`.

        Raises:
            LogError: a value is not of this kind.
        """
        if kind == "metrics":
            self.log_metrics(values, step)
            return
        from instep.loggers.kinds import MAKERS  # imported late: it loads NumPy

        if kind not in MAKERS:
            raise one_of("kind", kind, ("metrics", *MAKERS))
        if self.delivery.is_main and _has_place(self, kind):
            step = self.delivery.step_now() if step is None else int(step)
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
            key: name of the text, or a dict of texts by name.
            text: the text.
            step: the global step. None: the run's current step, or the last logged step if no run is open.
            columns: column names, to record a table of texts as in `log_table`.
            data: rows of the table.
            dataframe: a dataframe, in place of `columns` and `data`.
        """
        if columns is not None or data is not None or dataframe is not None:
            self.log("table", {str(key): None}, step, columns=columns, data=data, dataframe=dataframe)
        else:
            self.log("text", key if isinstance(key, Mapping) else {key: text}, step)

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record one picture or several under a name.

        Args:
            key: name of the pictures.
            images: one picture or a list of pictures. Each is a tensor of shape (channels, height, width) with floats
                from 0 to 1 or integers from 0 to 255, an array of that shape or (height, width, channels), a PIL image,
                or a path. A tensor or array of 4 dimensions is a batch of pictures.
            step: the global step. None: the run's current step, or the last logged step if no run is open.
            **kwargs: `caption`: one text, or a list with a text for each picture.
        """
        self.log("image", {key: images}, step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record pictures by name; each value has a form that `log_image` accepts."""
        self.log("image", values, step, **kwargs)

    def log_audio(self, key: str, audios: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record sounds.

        Args:
            key: name of the sounds.
            audios: one sound or a list of sounds: tensors or arrays of floats from -1 to 1, of shape (samples,),
                (samples, channels) or (channels, samples).
            step: the global step. None: the run's current step, or the last logged step if no run is open.
            **kwargs: `sample_rate` in Hz (44,100 by default) and `caption`; each is one value, or a list with a value
                for each sound.
        """
        self.log("audio", {key: audios}, step, **kwargs)

    def log_video(self, key: str, videos: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record videos.

        Args:
            key: name of the videos.
            videos: one video or a list of videos: tensors or arrays of shape (frames, channels, height, width).
            step: the global step. None: the run's current step, or the last logged step if no run is open.
            **kwargs: `fps`, the frames per second (4 by default), and `caption`; each is one value, or a list with a
                value for each video.
        """
        self.log("video", {key: videos}, step, **kwargs)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Record a matplotlib figure as a picture, and close the figure unless `close` is False."""
        self.log("figure", {key: figure}, step, close=close)

    def log_histogram(self, key: str, values: Any, step: int | None = None, bins: int = 64) -> None:
        """Record a histogram: of the finite values of a tensor or array, or given as a pair of bin counts and edges."""
        self.log("histogram", {key: values}, step, bins=bins)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Iterable[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record a table, given as column names and rows or as a pandas-like dataframe."""
        self.log("table", {key: None}, step, columns=columns, data=data, dataframe=dataframe)

    def log_artifact(self, path: PathLike, name: str | None = None, type: str = "file") -> None:
        """Store a file or folder with the run. The logger's thread reads it later, so it must still exist then.

        Args:
            path: path of the file or folder.
            name: name of the artifact in the tracker. None: the last part of the path.
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
            params: a mapping, Namespace, dataclass or OmegaConf container, with any nesting; values that the logger
                cannot store are written as text.
            metrics: numbers by name to store beside the hyperparameters, if the logger supports this; a single number
                gets the name "hp_metric".
            step: the global step of `metrics`. None: the last logged step.

        Raises:
            UsageError: `params` is not a collection of named values.
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
        from instep.loggers.hparams import plain as as_json  # imported late: only needed for hyperparameters

        if step is not None:
            delivery.last_step = max(delivery.last_step, int(step))
        delivery.put("_log_hyperparams", (as_json(plain), numbers), max(delivery.last_step, 0))

    def log_graph(self, module: Module, example_input: Any = None) -> None:
        """Record the model's graph, if the logger has a hook for it, and wait until the graph is written."""
        if self.delivery.is_main and _has_place(self, "graph"):
            self.delivery.ask(partial(self._log_graph, module, example_input))

    def watch(self, module: Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Let the tracker's own package record gradients or parameters of a module in training, if it offers this.

        Args:
            module: the model.
            log: what to record: "gradients", "parameters", "all" or None.
            log_freq: number of backward passes between two records.
            log_graph: whether to record the model's graph too.
        """
        if self.delivery.is_main and _has_place(self, "watch"):
            self.delivery.ask(partial(self._log_watch, module, log, log_freq, log_graph))

    def after_save_checkpoint(self, path: Location) -> None:
        """Called when a checkpoint has been saved at this path; with `log_model="all"`, send it to the tracker."""
        delivery = self.delivery
        if delivery.is_main:
            if not delivery.is_open:
                delivery.put("_after_save_checkpoint", (to_path(path),))
            elif type(self)._after_save_checkpoint is not Logger._after_save_checkpoint:
                # Wait for the hook, since the checkpoint may be deleted later.
                delivery.ask(partial(self._after_save_checkpoint, to_path(path)))
            if self.log_model == "all":
                self.log_checkpoint(path)

    def log_checkpoint(self, path: Location, aliases: Sequence[str] = ()) -> None:
        """Store a checkpoint with the run, as an artifact of the tracker.

        Args:
            path: path of the checkpoint's folder or file.
            aliases: further names of the checkpoint in the tracker, such as "best".
        """
        if self.delivery.is_main and (takes(type(self), "checkpoint") or _has_place(self, "artifact")):
            self.delivery.put("_log_checkpoint", (to_path(path), list(aliases)))

    def save(self) -> None:
        """Send all waiting records to the tracker; records that cannot be sent are written to the disk."""
        self.delivery.save()

    def finalize(self, status: str = "success") -> None:
        """Close the logger; a second call does nothing. At the end of the program, an open logger is closed.

        Args:
            status: how the run ended: "success", "interrupted" or "failed".
        """
        self.delivery.close(status)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values that a resumed run needs to continue this run's logs.

        The waiting records are sent or written to the disk first, so that no record of the checkpoint's steps is lost.
        """
        return self.delivery.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next start continue the logs of the run that saved this state; close an open logger first.

        Args:
            state_dict: result of `state_dict`, with the step of the checkpoint added as `global_step`. Values that were
                logged at that step but after the save, such as a test's result, are kept.

        Raises:
            CorruptCheckpointError: the state's version leads out of the folder of logs.
        """
        self.delivery.load_state_dict(state_dict)

    # ---- hooks that a subclass overrides; all are optional

    def _start(self) -> None:
        """Open files or connections. `self.log_dir` is known, but the folder may not exist yet."""

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write metrics: plain numbers by name."""
        from instep.loggers.backlog import Row  # imported late: it loads NumPy

        self._log_rows([Row(metrics, step, self.delivery.time_s)])

    def _log_rows(self, rows: list[Row]) -> None:
        """Write several rows of metrics, all or none of them. If overridden, it is called instead of `_log_metrics`."""

    def _log_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        """Write pictures; figures are passed to this hook as pictures too."""

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
        """Let the tracker record gradients or parameters of a module while it trains; see `watch`."""

    def _log_artifact(self, artifact: Artifact) -> None:
        """Store a file or folder."""

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        """Store a checkpoint; by default as an artifact of the type "model"."""
        from instep.loggers.kinds import Artifact  # imported late: it loads NumPy

        self._log_artifact(Artifact(path, path.name, "model"))

    def _log_code(self, code: Code) -> None:
        """Store the git commit and uncommitted changes; by default as `git.json` and `git.patch` in `log_dir`."""
        from instep.loggers.kinds import write_code  # imported late: it loads NumPy

        write_code(code, self.delivery.folder)

    def _after_save_checkpoint(self, path: Path) -> None:
        """Record that a checkpoint has been saved."""

    def _save(self) -> None:
        """Flush buffered values to the disk or the tracker."""

    def _finalize(self, status: str) -> None:
        """Close what `_start` opened."""

    def _delivered(self) -> Mapping[str, int] | None:
        """Return the last step that the tracker has for each metric; None if this cannot be found out.

        Called only if the x-axis is "step": after `_start` in a resumed run and, if the logger's class has
        `_LOCAL = False`, after a failed call of a hook.
        """
        return None

    def _sent_name(self, name: str) -> str:
        """Convert a metric's name to a name that the tracker allows; the result may depend on nothing but the name."""
        return name

    def _experiment(self) -> Any:
        """Return the object for the property `experiment`: `_tracker`, or the logger itself if that is None."""
        return self if self._tracker is None else self._tracker


def takes(logger: type[Logger], kind: str) -> bool:
    """Return True if a logger class overrides the hook for a kind of value, such as "image"."""
    return getattr(logger, _hook(kind)) is not getattr(Logger, _hook(kind))


def _has_place(logger: Logger, kind: str) -> bool:
    """Return True if the logger can log a kind of value; otherwise warn once, and name loggers that can."""
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
