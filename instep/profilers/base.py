"""The base class of profilers, and the profiler that measures nothing, which a Trainer has by default."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from instep.types import PathLike
from instep.utils.paths import local_path

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_UNSAFE = re.compile(r"[\\/:*?\"<>|\s]+")

_MOST_LINES = 60  # maximum number of lines of a report that are printed


class Profiler(ABC):
    """Base class of profilers, which measure actions of a run: hooks, steps, waiting for data, saves, your own blocks.

    `Trainer(profiler=...)` accepts a profiler. A subclass defines what happens when an action starts and stops, and
    what is reported. Every rank writes its report into the run folder, and the main process also prints its report.

    Args:
        dirpath: folder of reports and traces. None: the folder `profiler/` in the run folder, or with a `filename` the
            run folder itself.
        filename: name in the reports' file names, `<stage>-<filename>-<rank>.txt` (without the rank for a single
            process). With a name, reports are printed only if there is no folder for them.

    Example:
        >>> class Counts(Profiler):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.calls = {}
        ...
        ...     def start(self, action_name):
        ...         self.calls[action_name] = self.calls.get(action_name, 0) + 1
        ...
        ...     def stop(self, action_name): ...
        ...
        ...     def summary(self):
        ...         return f"{self.calls}"
        >>> profiler = Counts()
        >>> with profiler.profile("reading"):
        ...     pass
        >>> profiler.summary()
        "{'reading': 1}"

    Source: names and arguments are those of Lightning's `Profiler`.
    """

    off: bool = False
    """True: the profiler measures nothing, and the loop runs as without a profiler."""
    _kind = "profile"

    def __init__(self, dirpath: PathLike | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else local_path(dirpath)
        self.filename = filename
        self._local_rank: int | None = None
        self._stage: str | None = None
        self._log_dir: Path | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Start measuring an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Stop measuring an action."""

    def summary(self) -> str:
        """Return the report; "" for no report."""
        return ""

    # ---- measuring actions

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Measure a `with` block, as in `with self.trainer.profiler.profile("reading"):`."""
        return self._measured(action_name)

    @contextmanager
    def _measured(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def wrap(self, action_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and measures each call."""
        return self._measured(action_name)(function)

    def batches(self, action_name: str, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and measure the waiting time before each batch."""
        rest, end = iter(batches), object()
        while True:
            with self.profile(action_name):
                batch = next(rest, end)
            if batch is end:
                return
            yield batch

    # ---- hooks of a run

    def attach(self, trainer: Trainer, module: TrainModule) -> None:  # noqa: B027  (an optional hook)
        """Prepare for a run of a Trainer, before its first action."""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: PathLike | None = None) -> None:
        """Begin a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: rank of this process in the whole job, in spite of the name, which is Lightning's; None if there
                is only one process.
            log_dir: the run folder; None if there is none.
        """
        self._stage, self._local_rank = stage, local_rank
        self._log_dir = None if log_dir is None else Path(log_dir)

    def describe(self) -> None:
        """Write the report into the folder, if there is one.

        The main process also prints it, unless there are both a folder and a `filename`.
        """
        text = self.summary()
        folder = self._folder
        path = None if folder is None else folder / self._prepare_filename()
        if text and folder is not None and path is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:  # mode "a": a resumed run appends its own report
                file.write(f"{text}\n")
        if text and self._local_rank in (None, 0) and (self.filename is None or path is None):
            lines = text.splitlines()
            # Only the first lines are printed, so that the reason for the run's end stays visible.
            if path is not None and len(lines) > _MOST_LINES:
                text = "\n".join([*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES:,} more lines in {path}"])
            print(text)  # noqa: T201  the report that was asked for

    def teardown(self, stage: str | None) -> None:  # noqa: B027  (an optional hook)
        """End a run, even after an error; may be called twice."""

    @property
    def local_rank(self) -> int:
        """Rank of this process in the whole job (the name is Lightning's); 0 if there is only one process."""
        return self._local_rank or 0

    @property
    def _folder(self) -> Path | None:
        """Folder of the profiler's files; None if no files are written."""
        if self.dirpath is not None or self._log_dir is None:
            return self.dirpath
        return self._log_dir / "profiler" if self.filename is None else self._log_dir

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        rank = None if self._local_rank is None else str(self._local_rank)
        # A file for a single action has the name of the action in its file name, in place of the kind of profiler.
        name = self._kind if action_name is None else None
        parts = (self._stage, self.filename or name, rank, action_name)
        return _UNSAFE.sub("_", "-".join(part for part in parts if part)) + extension

    def _title(self) -> str:
        rank = "" if self._local_rank is None else f", rank {self._local_rank}"
        return f"{'' if self._stage is None else f'{self._stage.upper()} '}Profiler Report{rank}"


class PassThroughProfiler(Profiler):
    """Profiler that measures nothing; a Trainer without `profiler=` uses it.

    Example:
        >>> profiler = PassThroughProfiler()
        >>> with profiler.profile("my_step"):  # as any profiler, so that code need not ask whether there is one
        ...     total = 1 + 1
        >>> profiler.summary()
        ''
    """

    off = True
    _nothing = nullcontext()

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return self._nothing


ProfilerName = Literal["simple", "advanced", "torch", "pytorch"]
