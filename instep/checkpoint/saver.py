"""`RunSaver`: saves the checkpoints of one run, for Trainer and Accelerator, and owns the run's folders.

A save collects the run's state, writes it, verifies it, and deletes the checkpoints that the policy no longer keeps. In
the background mode only the collecting is done immediately, and the other steps by a thread. No older checkpoint is
deleted before the new one has been verified.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from instep import checkpoint  # names of this package are imported when they are used
from instep.distributed.rank_zero import RankGroup
from instep.utils.paths import to_path

if TYPE_CHECKING:
    from instep.checkpoint import BackgroundSaver, CheckpointStore, PendingSave, Retention, Saved
    from instep.checkpoint.lineage import Line
    from instep.checkpoint.writer import BaseWriter
    from instep.types import Location


class RunSaver(ABC):
    """Save the checkpoints of one run. All methods are called on the training thread.

    Attributes:
        newest: the run's `NewestState`, a callback that saves the newest full state of a run that resumes by itself;
            None if there is none. `save` tells its method `note` which callback saves a full state, and gets from its
            method `superseded` the checkpoints that the new state replaces.
    """

    newest: Any = None

    def __init__(self) -> None:
        self._owned: dict[Path, CheckpointStore] = {}
        self._releases: dict[Path, weakref.finalize[..., RunSaver]] = {}
        self._swept: set[Path] = set()
        self._background: BackgroundSaver | None = None

    # ---- folders of checkpoints

    def own(self, folder: Location | None) -> None:
        """Take the lease of a folder, so that no other run saves there. Collective: all ranks call it.

        The lease is held until `release`, until this object is freed, or until the process ends. Taking it before the
        first step also checks that the folder can be written to and that all ranks see it.

        Raises:
            FolderInUseError: another run holds the folder.
            CheckpointError: the folder cannot be written to, or a rank does not see it.
        """
        store = self.store(folder)
        if store.root not in self._owned:
            store.own(self._line().run_id)
            self._owned[store.root] = store
            if store.lease is not None:
                self._releases[store.root] = weakref.finalize(self, store.lease.release)

    def release(self, *roots: Path) -> None:
        """Release the leases of the given folders, by default of all folders. Not collective."""
        for root in roots or tuple(self._owned):
            self._owned.pop(root, None)
            if root in self._releases:
                self._releases.pop(root)()

    def pass_on(self) -> None:
        """Give the leases of all folders to the resumed run, whose id this run has taken over. Not collective."""
        for store in self._owned.values():
            if store.lease is not None:
                store.lease.pass_to(self._line().run_id)

    def store(self, folder: Location | None) -> CheckpointStore:
        """Open the store of a folder, with the folder's lease if this run holds it. Not collective.

        Args:
            folder: folder of checkpoints. None: the folder where this run saves by default.
        """
        store = checkpoint.CheckpointStore(self._home() if folder is None else folder)
        return self._owned.get(store.root, store)

    # ---- saves

    def save(
        self,
        folder: Location | None,
        name: str | None = None,
        *,
        weights_only: bool = False,
        background: bool = False,
        keep: Retention | None = None,
        known: Sequence[Saved] = (),
        drop: Sequence[str] = (),
        keeper: Any = None,
        **info: Any,
    ) -> PendingSave:
        """Save the run in its current state; pass the result to `finish` for the checkpoint or the error. Collective.

        Args:
            folder: folder to save in. None: the folder where this run saves by default.
            name: name of the checkpoint's folder, without "-<attempt>". None: `step-<8 digits>`.
            weights_only: whether to leave out everything that only a resumed run needs, such as the optimizers' states.
            background: whether to copy the state now, and to write it in the background. Only one such save runs at a
                time; the next one waits for it.
            keep: policy that decides which older checkpoints are deleted after the new one has been verified. None: no
                checkpoint is deleted by a policy.
            known: checkpoints in this folder that the policy decides about, oldest first.
            drop: further checkpoints to delete after the new one has been verified.
            keeper: callback, such as a ModelCheckpoint, that requested this save and manages the checkpoint; it is
                passed to `newest`. None: no callback manages the checkpoint.
            info: JSON values for the manifest, such as monitor, mode and score.
        """
        newest = None if keeper is None or weights_only else self.newest
        if newest is not None:
            newest.note(None)
        with self._saving():
            self._prepare(weights_only)
            if self._background is not None:
                self._background.wait()
            store = self.store(folder)
            # Before the first save into a folder, remove the unfinished saves of killed processes.
            if store.root not in self._swept:
                self._swept.add(store.root)
                store.clean_stale()
            if background and self._background is None:
                self._background = checkpoint.BackgroundSaver()
            saver, copied = self._background, None
            with store.ranks.together("collecting the state of the run"):
                step, write, info = self._collect(weights_only, info)
                if saver is not None and background:
                    copied = saver.record(write)
            new = checkpoint.Saved("", step, info.get("score"))
            doing = f"deciding what to keep in {store.root}"
            ranked = [] if keep is None else store.ranks.on_rank_zero(lambda: keep.to_delete([*known, new]), doing)
            stale = [] if newest is None else newest.superseded(keeper, step)
            dropped = list(dict.fromkeys([*drop, *ranked, *stale]))
            paths = [to_path(key, like=store.root) for key in dropped]
            about: dict[str, Any] = {"info": info, "name": name, "line": self._line()}
            if saver is not None and copied is not None:
                pending = saver.start(store, step, copied, to_delete=paths, **about)
            else:
                pending = checkpoint.PendingSave()
                replaced = [(self.store(old.parent), old) for old in paths]
                pending._carry_out(store, replaced, step, write, **about)
            pending.weights_only, pending.keeper, pending.dropped = weights_only, keeper, dropped
        if newest is not None and (pending.background or pending.error is None):
            newest.note(keeper)
        return pending

    def finish(self, pending: PendingSave) -> Path:
        """Wait for a save, and pass its checkpoint to the loggers. Collective: all ranks call it.

        Returns:
            The checkpoint. It has been verified if it was saved in the background or if older ones were deleted.

        Raises:
            BaseException: the error of the save, on all ranks. If only the deletion of an older checkpoint failed,
                `pending.path` is set.
        """
        try:
            with self._saving() if pending.background else nullcontext():
                if pending.background:
                    pending.outcome(RankGroup())
                elif pending.error is not None:
                    raise pending.error
        except BaseException:
            if self.newest is not None and pending.keeper is not None:
                self.newest.note(None)
            if pending.path is not None:  # the save worked, but an older checkpoint could not be deleted
                self._committed(pending.path, pending.weights_only)
            raise
        path = cast("Path", pending.path)
        self._committed(path, pending.weights_only)
        return path

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for a running save, at most `timeout_s` seconds (None: no limit), and end the thread. Not collective."""
        saver, self._background = self._background, None
        if saver is not None:
            saver.close(timeout_s)

    # ---- methods that a subclass implements for its kind of run

    @abstractmethod
    def _line(self) -> Line:
        """Return the line of checkpoints that lead to the run's current state."""

    @abstractmethod
    def _home(self) -> Path:
        """Return the folder where the run saves by default."""

    @abstractmethod
    def _collect(self, weights_only: bool, info: dict[str, Any]) -> tuple[int, Callable[[BaseWriter], None], Any]:
        """Collect the state of this rank. Collective: all ranks call it.

        Returns:
            The global step; a function that writes this rank's files, which waits for no other rank and may be called
            again after a temporary error; and `info` with further values of the run.
        """

    def _saving(self) -> AbstractContextManager[Any]:
        """Return a context manager that is entered while the run saves."""
        return nullcontext()

    def _prepare(self, weights_only: bool) -> None:  # noqa: B027  not every run needs it
        """Prepare the run for `_collect`, before a save begins."""

    def _committed(self, path: Path, weights_only: bool) -> None:  # noqa: B027  not every run needs it
        """Process a complete checkpoint, for instance by passing it to the loggers; called once for each checkpoint."""
