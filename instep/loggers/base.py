"""The base class of loggers: it guards and keeps the books, a subclass writes."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from instep.errors import CorruptCheckpointError, InstepError, LogError, SettingError, UsageError
from instep.loggers.folders import RUNS, folder_name, is_free, make_next, next_version, version_of
from instep.types import Location, PathLike
from instep.utils.checks import PATH
from instep.utils.hparams import plain_values
from instep.utils.paths import local_path, to_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.nn import Module


class NoExperiment:
    """Stands for a logger's writer where there is none to write: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Logger:
    """Where metrics and hyperparameters of a run go.

    The public methods may be called at any time and on any rank: only the main process writes. What comes before
    `start` is kept and written at the start, or by `save`, `finalize` and the program's end where no run starts; with a
    `save_dir`, and before a Trainer has the logger, it is written at once. What comes after `finalize` opens the logger
    again. A subclass overrides the hooks `_start`, `_log_metrics`,
    `_log_hyperparams`, `_log_graph`, `_after_save_checkpoint`, `_save` and `_finalize`: they run on the main process
    only, while the logger is open, with plain numbers. An exception in a hook ends the run with an error that names the
    logger. A subclass that shows its writer calls `self._opened()` first: outside a run too that opens the logger.

    A logger writes into `log_dir`: the run folder that the Trainer gives to `start`, or, with an explicit `save_dir`,
    `<save_dir>/<name>/<version>`, where the version is the next free `version_N` unless given. The first logger with a
    `save_dir` decides: that folder is the run folder then, with the checkpoints, and loggers of the same `save_dir` and
    `name` write there too. Opened before a run a logger takes the folder that the run will have; where that turns out
    to be another one (the run is resumed, or has another `default_root_dir`), what was written moves there.

    Args:
        save_dir: where run folders go; the first logger that has one decides. None: the run folder.
        name: the run's name; with `save_dir` the folder's name.
        version: an int N for the folder `version_N`, or the folder's name; used with `save_dir` only.
        prefix: put before every metric's name, joined by "-".

    Raises:
        SettingError: `save_dir` is a URL.

    Example:
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
    _earlier: Path | None = None  # where it wrote then, when the run goes on elsewhere
    _fresh: bool = False  # nothing was in that folder
    _among_others: bool = False  # something was, and the user named it: what is written there stays there
    _claim: Callable[[], Path] | None = None  # the Trainer's, which gives the folder of its next run
    _decides: bool = False  # the Trainer's run folder is this logger's
    _resumed: bool = False
    _kept: list[tuple[str, tuple[Any, ...]]] | None = None
    _last_step: int = -1
    _prefix: str = ""
    _writers: AbstractSet[str] = frozenset()  # attributes of a subclass that exist while it is open
    _draws_graph: bool = False  # the Trainer calls `log_graph` at the start of fit

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        if "://" in str(save_dir):
            raise SettingError(
                f"{type(self).__name__}(save_dir={str(save_dir)!r}): logs are written into a folder of this machine. "
                "Give its path; checkpoints may go to a URL, by ModelCheckpoint(dirpath=...).",
                field="save_dir",
                got=save_dir,
            )
        self._save_dir = None if save_dir is None else local_path(PATH("save_dir", save_dir))
        self._name = name
        self._version = self._given_version = version
        self._prefix = f"{prefix}-" if prefix else ""

    def __getstate__(self) -> dict[str, Any]:
        # A copy is closed: it opens a writer of its own.
        return {**self.__dict__, "_open": False, **dict.fromkeys(self._writers & self.__dict__.keys())}

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
        """The folder with one folder per run, `<save_dir>/<name>`; None without a `save_dir`.

        A logger whose package makes the folders of its runs returns None: such a one never decides the run folder.
        """
        return None if self._save_dir is None else self._save_dir / self._name if self._name else self._save_dir

    @property
    def asked_folder(self) -> str | None:
        """The run folder's name in `runs_dir` that the user asked for by `version`; None leaves it open."""
        return None if self._given_version is None else folder_name(self._given_version)

    @property
    def last_folder(self) -> str | None:
        """The run folder's name in `runs_dir` that this logger wrote into last, else `asked_folder`."""
        return None if self._version is None else folder_name(self._version)

    # ---- the public methods

    def start(self, run_dir: PathLike, is_main: bool = True) -> None:
        """Open the logger and write what was kept.

        Called by the Trainer at the start of fit, validate, test and predict, after `load_state_dict`. Does nothing if
        the logger is open in that folder already.

        Args:
            run_dir: the run folder, used unless the logger has a `save_dir`.
            is_main: True on the main process; elsewhere the logger stays closed and swallows its records.
        """
        run_dir, early = Path(run_dir), self._early
        self._early = False
        if self._open and (self._run_dir == run_dir or (early and self._stays(run_dir))):
            self._run_dir = run_dir
            return
        if early:
            self._earlier = self._own_log_dir()
        if self._open:
            self.finalize("success")
        self._is_main = is_main
        self._run_dir = run_dir
        if not is_main:
            self._kept = None
            return
        self._reopen()

    def attach(self, claim: Callable[[], Path], decides: bool = False) -> None:
        """Say where the next run will write, for what is written before it. Called by the Trainer.

        Args:
            claim: makes the run folder, if it is not there yet, and returns it.
            decides: the run folder stands in this logger's `runs_dir`.
        """
        self._claim, self._decides = claim, decides

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
            self._call("_discard")
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
                plain |= {f"{name}/{part}": self._number(f"{name}/{part}", one) for part, one in value.items()}
            elif type(value) is not float and type(value) is not int:
                plain[name] = self._number(name, value)
        if self._prefix:
            plain = {self._prefix + name: value for name, value in plain.items()}
        if step > self._last_step:
            self._last_step = step
        if self._open:
            try:
                self._log_metrics(plain, step)
            except Exception as error:
                raise self._error(f"log_metrics at step {step}", error) from error
        else:
            self._later("_log_metrics", plain, step)

    @property
    def takes_text(self) -> bool:
        """Whether the logger has a place for texts: it overrides `_log_text`."""
        return type(self)._log_text is not Logger._log_text

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Record texts by name, such as samples of what a model says.

        Args:
            texts: by name.
            step: the global step.

        Raises:
            LogError: the logger has no place for texts.
        """
        if not self.takes_text:
            raise LogError(f"{type(self).__name__} takes numbers only, and got the texts {', '.join(texts)}")
        if self._is_main:
            self._do("_log_text", {self._prefix + name: text for name, text in texts.items()}, step)

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
            numbers = {name: self._number(name, value) for name, value in named.items()}
        if step is not None:
            self._last_step = max(self._last_step, step)
        self._do("_log_hyperparams", plain, numbers)

    def log_graph(self, module: Module, example_input: Any = None) -> None:
        """Record the model's graph, where the logger has a place for that."""
        if self._is_main:
            self._do("_log_graph", module, example_input)

    def after_save_checkpoint(self, path: Location) -> None:
        """Take note of a checkpoint that was committed at this path."""
        if self._is_main:
            self._do("_after_save_checkpoint", to_path(path))

    def save(self) -> None:
        """Bring everything recorded so far to the disk."""
        if self._open or (self._waits and self._opened()):
            self._call("_save")

    def finalize(self, status: str = "success") -> None:
        """Close the logger; a second call does nothing.

        Args:
            status: "success", "interrupted" or "failed".
        """
        if self._waits:
            self._opened()
        if self._open:
            self._open = False  # first: a failing close is not tried again
            self._call("_finalize", status)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to append instead of starting anew: JSON values.

        Flushes first, so that a checkpoint never knows more than the files do.
        """
        if self._open:
            self._call("_save")
        return {"version": self._version, "step": self._last_step}

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
            self._early, self._earlier, self._version = False, self._own_log_dir(), self._given_version
        if self._version is None:
            version = state_dict.get("version")
            name, kind = str(version), type(self).__name__
            is_name = name != ".." and Path(name).name == name and "\0" not in name
            if not is_name or not isinstance(version, int | str | None):
                raise CorruptCheckpointError(
                    f"the checkpoint's {kind} has the version {version!r}, which is no name of a folder. Give "
                    f"version=... to {kind}, or resume with Resume(loggers=False)."
                )
            self._version = version
        self._last_step = max(state_dict.get("step", -1), state_dict.get("global_step", -1))
        self._resumed = True

    # ---- the hooks, all optional

    def _start(self) -> None:
        """Open files or connections; `self._log_dir` is known, its folder not made yet."""

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write plain numbers."""

    def _log_text(self, texts: dict[str, str], step: int) -> None:
        """Write texts."""

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Write hyperparameters."""

    def _log_graph(self, module: Module, example_input: Any) -> None:
        """Write the model's graph."""

    def _after_save_checkpoint(self, path: Path) -> None:
        """Take note of a committed checkpoint."""

    def _save(self) -> None:
        """Flush."""

    def _finalize(self, status: str) -> None:
        """Close what `_start` opened."""

    def _take_along(self, earlier: Path) -> None:
        """Move what was written before the run from `earlier` to `log_dir`; after `_start`."""

    def _discard(self) -> None:
        """Delete what was written before the run; after `_finalize`."""
        if self._fresh and self._log_dir is not None:
            rmtree(self._log_dir, ignore_errors=True)
            self._remove_if_empty(self._log_dir.parent)  # of a sub_dir, the run folder

    @staticmethod
    def _remove_if_empty(folder: Path) -> None:
        with suppress(OSError):  # others write there too
            folder.rmdir()

    # ---- the books

    @property
    def _waits(self) -> bool:
        """Whether something is kept for a run that has not begun."""
        return bool(self._kept) and self._run_dir is None

    def _opened(self) -> bool:
        """Open the logger if it is not open, outside a run too; whether this process writes."""
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

    def _own_log_dir(self) -> Path | None:
        """Return where the logger wrote before a run, if all of that is its own and can move."""
        return None if self._among_others else self._log_dir

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

    def _do(self, hook: str, *args: Any) -> None:
        if self._open:
            self._call(hook, *args)
        else:
            self._later(hook, *args)

    def _later(self, hook: str, *args: Any) -> None:
        if self._run_dir is not None:
            self._opened()
            self._call(hook, *args)
        elif self.runs_dir is not None and self._claim is None and self._opened():
            self._call(hook, *args)  # used by hand: no Trainer is to say where
        elif self._kept is not None:
            self._kept.append((hook, args))
        elif self._is_main_here():
            self._kept = [(hook, args)]
            self._close_at_exit()

    def _reopen(self) -> None:
        assert self._run_dir is not None
        self._log_dir = self._choose_log_dir(self._run_dir)
        self._call("_start")
        self._open = True
        self._resumed = False
        earlier, self._earlier = self._earlier, None
        if earlier is not None and earlier != self._log_dir:
            self._call("_take_along", earlier)
            self._remove_if_empty(earlier)
            self._remove_if_empty(earlier.parent)
        kept, self._kept = self._kept, None
        for hook, args in kept or ():
            self._call(hook, *args)

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

    def _call(self, hook: str, *args: Any) -> None:
        try:
            getattr(self, hook)(*args)
        except InstepError:
            raise
        except Exception as error:
            raise self._error(hook.strip("_"), error) from error

    def _error(self, doing: str, error: Exception) -> InstepError:
        if isinstance(error, InstepError):
            return error
        return InstepError(
            f"{type(self).__name__} failed in {doing}: {type(error).__name__}: {str(error).rstrip('.')}. "
            f"It writes into {self.log_dir!r}. Repair the cause, or leave this logger out of Trainer(logger=...)."
        )

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LogError(
                f"{type(self).__name__}: the metric {name!r} must be a number, "
                f"got {type(value).__name__}: {repr(value)[:80]}. "
                "Log one scalar per name; texts and settings go to log_hyperparams."
            ) from error
