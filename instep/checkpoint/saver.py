"""Saving of one run, for Trainer and Accelerator: the folders that a run owns, and a save as one call.

A save collects the run's state, writes it, verifies it, and deletes what the policy no longer keeps. It does all this
at once, or it collects at once and does the rest in the background. No older checkpoint is deleted before the new one
has verified.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from instep import checkpoint  # its names load when used
from instep.distributed.rank_zero import RankGroup
from instep.utils.paths import to_path

if TYPE_CHECKING:
    from instep.checkpoint import BackgroundSaver, CheckpointStore, PendingSave, Retention, Saved
    from instep.checkpoint.lineage import Line
    from instep.checkpoint.writer import BaseWriter
    from instep.types import Location


class RunSaver(ABC):
    """Saver of one run. Its methods are called on the training thread.

    Attributes:
        newest: keeper of the newest full state, if the run resumes by itself. A save calls its `superseded` and `note`.
    """

    newest: Any = None

    def __init__(self) -> None:
        self._owned: dict[Path, CheckpointStore] = {}
        self._releases: dict[Path, weakref.finalize[..., RunSaver]] = {}
        self._swept: set[Path] = set()
        self._background: BackgroundSaver | None = None

    # ---- folders

    def own(self, folder: Location | None) -> None:
        """Take a folder until `release`, until this object is freed, or until the process exits.

        This proves, before the first step, that the folder can be written to and that all ranks see it.

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
        """Release folders, all by default. Local."""
        for root in roots or tuple(self._owned):
            self._owned.pop(root, None)
            if root in self._releases:
                self._releases.pop(root)()

    def pass_on(self) -> None:
        """Pass the folders on to the run that was resumed. Local."""
        for store in self._owned.values():
            if store.lease is not None:
                store.lease.pass_to(self._line().run_id)

    def store(self, folder: Location | None) -> CheckpointStore:
        """Open a folder, with its lease if the run owns it. None opens the folder where this run saves by default.

        Local.
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
        """Save the run in its current state. `finish` returns the checkpoint or raises the error.

        Args:
            folder: folder to save in; None for the run's default.
            name: the folder's name, without its attempt; None for `step-<8 digits>`.
            weights_only: whether to leave out what only a resumed run needs.
            background: whether to copy the state now and do the rest in the background. Only one such save runs at a
                time; the next one waits for it.
            keep: policy by which older checkpoints are deleted once the new one has verified; None deletes none by
                policy.
            known: checkpoints in this folder from which `keep` chooses, oldest first.
            drop: further checkpoints to delete then.
            keeper: callback that asked for this save, for `newest`; None if no callback lists the save.
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
            # before the first save of this run there, remove what killed processes left
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
        """Wait for a save, and report its checkpoint. Collective: all ranks call it.

        Returns:
            The checkpoint. It has verified if it was saved in the background or if older ones were deleted.

        Raises:
            BaseException: error of the save, on all ranks. `pending.path` is set if only a deletion failed.
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
            if pending.path is not None:  # the new checkpoint is valid, although an older one could not be deleted
                self._committed(pending.path, pending.weights_only)
            raise
        path = cast("Path", pending.path)
        self._committed(path, pending.weights_only)
        return path

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for a running save, at most for this time. Local."""
        saver, self._background = self._background, None
        if saver is not None:
            saver.close(timeout_s)

    # ---- what a run is

    @abstractmethod
    def _line(self) -> Line:
        """Return the run's line."""

    @abstractmethod
    def _home(self) -> Path:
        """Return the folder where the run saves by default."""

    @abstractmethod
    def _collect(self, weights_only: bool, info: dict[str, Any]) -> tuple[int, Callable[[BaseWriter], None], Any]:
        """Collect this rank's state. Collective: all ranks call it.

        Returns:
            The global step; a function that writes this rank's files, waits for no other rank, and may be called again
            after a short fault; and `info` with further values of the run.
        """

    def _saving(self) -> AbstractContextManager[Any]:
        """Return a context in which the run is saved."""
        return nullcontext()

    def _prepare(self, weights_only: bool) -> None:  # noqa: B027  not every run has something to do
        """Bring the run into a state that can be collected."""

    def _committed(self, path: Path, weights_only: bool) -> None:  # noqa: B027  not every run shows it
        """Report a checkpoint to loggers and others that must know it."""
