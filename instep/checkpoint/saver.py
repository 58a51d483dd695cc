"""Saving of one run, the same for Trainer and Accelerator: the folders that it owns, and a save that is one call.

A save collects the run's state, writes it, verifies it, and deletes what the policy keeps no longer. It does this at
once; or it collects at once, and does the rest beside the training. Nothing older is deleted before the new checkpoint
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
        newest: keeper of the newest full state, where the run goes on by itself: `superseded` and `note` are asked.
    """

    newest: Any = None

    def __init__(self) -> None:
        self._owned: dict[Path, CheckpointStore] = {}
        self._releases: dict[Path, weakref.finalize[..., RunSaver]] = {}
        self._swept: set[Path] = set()
        self._background: BackgroundSaver | None = None

    # ---- folders

    def own(self, folder: Location | None) -> None:
        """Take a folder until `release`, until this object is gone, or the process exits.

        This proves, before the first step, that the folder can be written to and that all ranks see it.

        Raises:
            FolderInUseError: another run has it.
            CheckpointError: it cannot be written to, or a rank does not see it.
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
        """Open a folder, with its lease where the run owns it; None: where this run saves by itself. Local."""
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
        """Save the run as it is now; `finish` returns the checkpoint, or raises what went wrong.

        Args:
            folder: where to; None: where this run saves by itself.
            name: the folder's name, without its attempt; None for `step-<8 digits>`.
            weights_only: leave out what only a resumed run needs.
            background: copy the state now, and do the rest beside the training. One at a time: the next one waits.
            keep: the policy by which older ones are deleted once this one has verified; None deletes none by policy.
            known: the checkpoints that `keep` chooses from, the oldest first; all in this folder.
            drop: further ones to delete then.
            keeper: the callback that asked for this save, as `newest` knows it; None for a save that nobody lists.
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
            if store.root not in self._swept:  # before this run's first save there, remove what killed processes left
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
        """Wait for a save, and show its checkpoint. Collective.

        Returns:
            The checkpoint, which has verified where it was saved in the background, or where older ones were deleted.

        Raises:
            BaseException: the save's error, on all ranks. `pending.path` is set where only a deletion failed.
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
            if pending.path is not None:  # the new checkpoint counts, although an older one could not be deleted
                self._committed(pending.path, pending.weights_only)
            raise
        path = cast("Path", pending.path)
        self._committed(path, pending.weights_only)
        return path

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save that is under way, for so long at most. Local."""
        saver, self._background = self._background, None
        if saver is not None:
            saver.close(timeout_s)

    # ---- what a run is

    @abstractmethod
    def _line(self) -> Line:
        """Return the run's line."""

    @abstractmethod
    def _home(self) -> Path:
        """Return where the run saves by itself."""

    @abstractmethod
    def _collect(self, weights_only: bool, info: dict[str, Any]) -> tuple[int, Callable[[BaseWriter], None], Any]:
        """Collect this rank's state. Collective.

        Returns:
            The global step; what writes this rank's files, waits for no other rank, and may be called again after a
            short fault; and `info` with what the run says of itself.
        """

    def _saving(self) -> AbstractContextManager[Any]:
        """Return what to do the saving within."""
        return nullcontext()

    def _prepare(self, weights_only: bool) -> None:  # noqa: B027  not every run has something to do
        """Bring the run to where it can be collected."""

    def _committed(self, path: Path, weights_only: bool) -> None:  # noqa: B027  not every run shows it
        """Show a checkpoint to those who want to know of it."""
