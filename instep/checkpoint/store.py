"""`CheckpointStore`: save, list, verify, open and delete the checkpoints of one folder."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from instep import __version__
from instep.checkpoint import names
from instep.checkpoint.files import PAUSES_S, Files, passing, wait
from instep.checkpoint.hashing import FileRecord
from instep.checkpoint.lease import Lease, check_seen, last_run
from instep.checkpoint.lineage import Line
from instep.checkpoint.manifest import Manifest, read_manifest
from instep.checkpoint.reader import Reader, file_problem, folder_problems
from instep.checkpoint.remote import files_of
from instep.checkpoint.scan import (
    Broken,
    CheckpointInfo,
    best_first,
    check_keyword,
    facts,
    folder_names,
    list_checkpoints,
    read_or_say,
)
from instep.checkpoint.writer import Writer
from instep.distributed.rank_zero import RankGroup
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DistributedError,
    RemoteError,
)
from instep.types import Location
from instep.utils.paths import to_path
from instep.utils.warn import warn_user

T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one folder, which are saved completely or not at all, and verified before use.

    Methods marked *collective* must be called by all ranks, and return the same result on each: rank 0 reads the disk
    and broadcasts. All other methods are local. With several nodes the folder must be on a shared file system.

    Args:
        root: folder of the checkpoints, or its URL ("s3://bucket/run"). The first save creates it.
        files: file operations, in which tests can inject errors. None: those of the folder's file system.
        ranks: process group of the ranks that save together. None: all ranks, on the training thread.
        lease: lease of the folder, which rank 0 checks before every commit and deletion. Without a lease, the caller
            must make sure that no other program writes into the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CheckpointStore(folder)
        ...     path = store.save(1200, lambda writer: writer.state("trainer", {"epoch": 3}))
        ...     (path.name, store.verify(path), store.read(path).state("trainer"))
        ('step-00001200-1', [], {'epoch': 3})
    """

    def __init__(
        self, root: Location, files: Files | None = None, *, ranks: RankGroup | None = None, lease: Lease | None = None
    ) -> None:
        self.root = to_path(root).absolute()  # absolute, so that the working directory may change later
        self.files = files if files is not None else files_of(self.root)
        self.ranks = ranks if ranks is not None else RankGroup()
        self.lease = lease

    def own(self, run_id: str) -> None:
        """Take the lease of the folder, and create the folder if it does not exist. Collective: all ranks call it.

        This also checks that the folder can be written to and that all ranks see it. `lease.release()` releases the
        lease.

        Args:
            run_id: id of the run that saves.

        Raises:
            FolderInUseError: another run holds the folder.
            CheckpointError: the folder cannot be written to, or a rank does not see it.
        """

        def take() -> str:
            self.lease = Lease.take(self.root, run_id, self.files)
            return self.lease.path.name

        name = self.ranks.on_rank_zero(take, f"taking {self.root} for this run")
        try:
            with self.ranks.together(f"looking for {name} in {self.root}"):
                check_seen(self.root / name, self.files, self.ranks.rank_and_size()[0])
        except BaseException:
            if self.lease is not None:
                self.lease.release()
            raise

    def save(
        self,
        step: int,
        write: Callable[[Writer], None],
        *,
        info: Mapping[str, Any] | None = None,
        name: str | None = None,
        run_id: str = "",
        line: Line | None = None,
    ) -> Path:
        """Save a checkpoint, and wait until all of it is on the disk. Collective: all ranks call it.

        Every rank calls `write`, which must not wait for another rank. If `write` raises an error on any rank, or the
        disk is full, the save fails on all ranks, the files that were written are removed, and the older checkpoints
        are not changed. After an error that may be temporary (of a network or server), rank 0 warns, and after a pause
        all ranks call `write` again for another folder, at most twice.

        Args:
            step: the global step; the same on every rank.
            write: function that writes this rank's files.
            info: JSON values to store in the manifest: kind ("full" or "weights"), epoch, monitor, mode, score and so
                on; those of rank 0 are used.
            name: name of the folder without "-<attempt>". None: "step-<8 digits>".
            run_id: id of the run that saves.
            line: the checkpoints that lead to the run's state; if given, `run_id` is not used.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written; the message has the path and the cause.
            UnsavableStateError: a state contains a value that cannot be encoded.
            RemoteError: another rank failed; the message has that rank's traceback.
        """
        saved: Path | _FailedTries = _FailedTries(0, 0, "")
        line = Line(run_id) if line is None else line
        while isinstance(saved, _FailedTries):
            saved = self._try(step, write, info or {}, name, line, saved)
        return saved

    def scan(self) -> list[CheckpointInfo]:
        """Return the checkpoints with a valid manifest, the last saved first. Not collective.

        Returns:
            The checkpoints; empty if the folder does not exist.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        return [found for found in list_checkpoints(self.root) if isinstance(found, CheckpointInfo)]

    def last_run(self) -> str | None:
        """Return the id of the run that held the folder's lease before this process; None if unknown. Collective."""
        return self.ranks.on_rank_zero(lambda: last_run(self.root, self.files), f"looking for the lease of {self.root}")

    def verify(self, path: Location) -> list[str]:
        """Return a list of what is wrong with a checkpoint; empty if all checksums match. Not collective."""
        return folder_problems(self._inside(path))

    def verify_together(self, path: Location) -> list[str]:
        """Return a list of what is wrong with a checkpoint; each rank reads some of the files. Collective."""
        folder = self._inside(path)
        manifest, problem = self.ranks.on_rank_zero(lambda: read_or_say(folder), f"verifying {folder}")
        return [problem] if manifest is None else self._problems(folder, manifest)

    def open_verified(self, path: Location) -> Reader:
        """Verify a whole checkpoint, of which each rank reads some files, and open it. Collective: all ranks call it.

        Args:
            path: folder of the checkpoint, or the folder's name in this store.

        Returns:
            A reader that does not verify the files again.

        Raises:
            CheckpointNotFoundError: the folder has no manifest.
            CorruptCheckpointError: the checkpoint does not verify.
        """
        folder = self._inside(path)
        manifest = self.ranks.on_rank_zero(lambda: read_manifest(folder), f"opening {folder}")
        problems = self._problems(folder, manifest)
        if problems:
            raise CorruptCheckpointError(f"{folder} does not verify: {'; '.join(problems)}", path=folder)
        return Reader(folder, False, manifest)

    def newest_verified(
        self, kind: str | None = None, job: str | None = None, also: Sequence[Path] = ()
    ) -> Reader | None:
        """Open the newest checkpoint that can be verified. Collective: all ranks call it.

        Newer checkpoints that are damaged are skipped, with a warning that says what is wrong.

        Args:
            kind: kind of the checkpoint: "full" or "weights". None: any kind.
            job: job id in the checkpoint's manifest. None: any job.
            also: further folders to search.

        Returns:
            A reader of the checkpoint; None if there is no such checkpoint.
        """

        def look_for_them() -> list[CheckpointInfo | Broken]:
            found = list_checkpoints(*dict.fromkeys((self.root, *also)))
            return [one for one in found if isinstance(one, Broken) or job in (None, one.manifest.info.get("job"))]

        candidates = self.ranks.on_rank_zero(look_for_them, f"looking for checkpoints in {self.root}")
        return self._first_verified([c for c in candidates if isinstance(c, Broken) or kind in (None, c.kind)])[0]

    def resolve(
        self,
        keyword: str,
        *,
        kind: str | None = None,
        monitor: str | None = None,
        mode: str | None = None,
        line: Line | None = None,
        also: Sequence[Path] = (),
    ) -> Reader | None:
        """Verify and open the checkpoint for a keyword: "last", "best" or "auto". Collective: all ranks call it.

        Args:
            keyword: "last": the checkpoint that was saved last. "best": the one with the best score in its manifest;
                nan is never the best. "auto": like "last", but None if there is no checkpoint to resume from.
            kind: kind of the checkpoint: "full" or "weights". None: any kind, but only "full" for "auto".
            monitor: metric for "best"; needed only if the checkpoints have scores of several metrics.
            mode: "min" or "max" for "best"; needed only if the checkpoints have scores of both modes.
            line: a run, and the earlier runs that it continues: search only the checkpoints of this line. None: search
                the line of the run that saved last. If none of its checkpoints can be verified, "last" and "auto"
                search the other runs' checkpoints too.
            also: further folders to search.

        Returns:
            A reader that does not verify the files again; None only for "auto".

        Raises:
            SettingError: the keyword is unknown.
            CorruptCheckpointError: all such checkpoints are damaged.
            CheckpointNotFoundError: there is no such checkpoint (only for "last" and "best").
        """
        check_keyword(keyword)
        kind = "full" if keyword == "auto" and kind is None else kind
        roots = list(dict.fromkeys((self.root, *also)))
        where = ", ".join(map(str, roots))
        candidates, others = self.ranks.on_rank_zero(
            lambda: _candidates(
                keyword, list_checkpoints(*roots), kind, (monitor, mode), line, last_run(self.root, self.files)
            ),
            f"looking in {where}",
        )
        chosen, broken = self._first_verified(candidates)
        if others and line is None and self.ranks.rank_and_size()[0] == 0:
            warn_user(
                f"{where} holds the checkpoints of {others + 1} runs. {keyword!r} means those of the run that saved "
                f"last{'' if chosen is None else f', and is {chosen.path}'}. Give the path of another one to take "
                "that, and each run a folder of its own."
            )
        if chosen is not None:
            return chosen
        # Raise an error for "auto" too: if None were returned, a run would begin at step 0, although its checkpoints
        # may be repaired.
        if broken:
            afresh = ", or move them away to start afresh" if keyword == "auto" else ""
            raise CorruptCheckpointError(
                f"{keyword!r}: none of the checkpoints in {where} verifies:\n  "
                + "\n  ".join(broken[:5])
                + f"\n  and {len(broken) - 5} more" * (len(broken) > 5)
                + f"\nMend them or give the path of another one{afresh}.",
                path=self.root,
            )
        if keyword == "auto":
            return None
        what = "with a score" if keyword == "best" else f"of kind {kind!r}" if kind else "that verifies"
        of_run = "" if line is None else f" of this run ({line.run_id})"
        raise CheckpointNotFoundError(f"{keyword!r}: {where} has no checkpoint {what}{of_run}", path=self.root)

    def read(self, path: Location, verify: bool = True) -> Reader:
        """Open a checkpoint, whose files are verified when this process first reads them. Not collective.

        Args:
            path: folder of the checkpoint, or the folder's name in this store.
            verify: whether to verify files. Pass False only if this job has verified the checkpoint.

        Raises:
            CheckpointNotFoundError: the folder has no manifest.
            CorruptCheckpointError: the manifest is damaged.
        """
        return Reader(self._inside(path), verify)

    def delete(self, path: Location) -> None:
        """Delete a checkpoint, which disappears atomically; do nothing if it does not exist. Collective.

        Raises:
            CheckpointError: the checkpoint is not in this store, or could not be removed.
        """
        folder = self._inside(path)
        self.ranks.on_rank_zero(lambda: self._delete(folder), f"deleting {folder}")

    def sweep(self, of_other_hosts: bool = False) -> list[Path]:
        """Remove the folders of unfinished saves and deletions whose processes have ended. Collective.

        Args:
            of_other_hosts: whether to remove folders of processes on other hosts too, although they may still run. Pass
                True only if no other process can be writing into the folder.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: a folder could not be removed.
        """
        return self.ranks.on_rank_zero(lambda: self._sweep(of_other_hosts), f"sweeping {self.root}")

    def clean_stale(self) -> None:
        """Call `sweep`, and warn instead of raising an error, so that the following save does not fail. Collective."""
        try:
            self.sweep(of_other_hosts=self.lease is not None)
        except (CheckpointError, RemoteError) as error:
            if self.ranks.rank_and_size()[0] == 0:
                warn_user(f"what an earlier run left in {self.root} stays there: {error}")

    def _try(
        self,
        step: int,
        write: Callable[[Writer], None],
        info: Mapping[str, Any],
        name: str | None,
        line: Line,
        before: _FailedTries,
    ) -> Path | _FailedTries:
        """Try to save once; return the folder, or a record of the failed try if the error may be temporary.

        All ranks return the same. At the last try, an error is raised instead.
        """
        begun = self.ranks.on_rank_zero(
            lambda: before.or_again(lambda: self._begin(step, name, before), before.attempt), "starting a checkpoint"
        )
        if isinstance(begun, _FailedTries):
            return begun
        folder, final, attempt = begun
        rank, world_size = self.ranks.rank_and_size()
        error: BaseException | None = None
        writer = Writer(folder, self.files, rank, world_size)
        try:
            write(writer)
        except BaseException as caught:  # noqa: BLE001  raised again below, together with the other ranks
            error = caught
        mine = None if error is None else (passing(error), str(error))
        parts = self.ranks.from_every_rank((step, writer.records, mine))
        failures = [failure for _, _, failure in parts if failure is not None]
        if failures:
            if rank == 0:
                self._remove_quietly(folder)
            if not before.last and all(passes for passes, _ in failures):
                return before.again(attempt, failures[0][1])
            self.ranks.fail_together(error, f"saving {final}")
        records = [(step, records) for step, records, _ in parts]
        done = self.ranks.on_rank_zero(
            lambda: before.or_again(lambda: self._commit(folder, final, attempt, records, info, line), attempt),
            f"saving {final}",
        )
        return final if done is None else done

    # The following methods run on rank 0 only.

    def _begin(self, step: int, name: str | None, before: _FailedTries) -> tuple[Path, Path, int]:
        if before.tries:
            wait(
                PAUSES_S[before.tries - 1],
                f"saving step {step} failed, and is tried again in another folder: {before.why}",
            )
        base = names.base_name(step, name)
        self._check_lease()  # checked before anything is created, since another run may hold `root` now
        try:
            self.files.make_root(self.root)
            # All saves of a step get different attempt numbers, even with other names, so that their order is known.
            used = [other.attempt for other in facts(self.root, by_name=True) if other.step == step]
            used += [parts[1] for parts in map(names.split_name, folder_names(self.root)) if parts and parts[0] == base]
            attempt = max([*used, before.attempt]) + 1
            while True:
                final = self.root / f"{base}-{attempt}"
                try:
                    return self.files.begin(final), final, attempt
                except FileExistsError:  # another save has just created the folder
                    attempt += 1
        except OSError as error:
            raise CheckpointError(
                f"could not start a checkpoint in {self.root}: {error.strerror or error} ({error.filename}). "
                "Make the folder writable, or choose another.",
                path=self.root,
            ) from error

    def _commit(
        self,
        folder: Path,
        final: Path,
        attempt: int,
        parts: Sequence[tuple[int, dict[str, FileRecord]]],
        info: Mapping[str, Any],
        line: Line,
    ) -> None:
        renamed: Path | None = None
        try:
            sizes = self.files.sizes(folder)
            records = _joined(parts, sizes, folder)
            foreign = [name for name in sorted(sizes.keys() - records.keys()) if names.is_inner_name(name)]
            serial = self._next_serial(line)
            manifest = Manifest(
                step=parts[0][0],
                attempt=attempt,
                serial=serial,
                run_id=line.run_id,
                resumed_from=line.resumed_from,
                world_size=len(parts),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                versions={"instep": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
                files={**{name: self.files.sync_and_hash(folder / name) for name in foreign}, **records},
                info=info,
            ).to_bytes()
            self.files.write_manifest(folder, manifest)
            self._check_lease()
            renamed = final
            self.files.publish(folder, final, manifest)
            line.serial = serial
            if self.lease is not None:
                self.lease.serial = serial
        except BaseException as error:
            self._remove_quietly(folder, renamed)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"could not commit {final}: {error.strerror or error}. The older checkpoints are intact.",
                    path=final,
                ) from error
            raise

    def _next_serial(self, line: Line) -> int:
        """Return a serial number higher than those of all saves of the run and of the folder.

        If this run holds the lease, the folder is scanned only at the first save.
        """
        known = None if self.lease is None else self.lease.serial
        if known is None:
            # Checkpoints that were copied from another folder are included: the result must be above their numbers.
            known = max((other.serial for other in facts(self.root)), default=0)
        return 1 + max(known, line.serial)

    def _delete(self, folder: Path) -> None:
        if folder.parent != self.root or names.split_name(folder.name) is None:
            raise CheckpointError(f"{folder} is not a checkpoint of {self.root}; it is left alone", path=folder)
        self._check_lease()
        try:
            self.files.delete(folder)
        except OSError as error:
            raise CheckpointError(f"could not delete {folder}: {error.strerror or error}", path=folder) from error

    def _sweep(self, of_other_hosts: bool) -> list[Path]:
        self._check_lease()
        removed: list[Path] = []
        folder = self.root
        try:
            for folder, gone in self.files.leftovers(self.root):
                if of_other_hosts if gone is None else gone:
                    self.files.delete(folder)
                    removed.append(folder)
        except OSError as error:
            raise CheckpointError(f"could not remove {folder}: {error.strerror or error}", path=folder) from error
        return removed

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _remove_quietly(self, folder: Path, renamed: Path | None = None) -> None:
        """Remove the folder of a failed save; warn instead of raising, so that the error of the save is not hidden.

        Args:
            folder: folder that the save has written to.
            renamed: final folder, if the failed save may already have renamed `folder` to it; else None.
        """
        try:
            self.files.delete(folder if renamed in (None, folder) or folder.exists() else renamed)
        except OSError as error:
            warn_user(f"could not remove {folder}, which a failed save left: {error}. The next sweep() removes it.")

    # The following methods run on all ranks.

    def _problems(self, folder: Path, manifest: Manifest) -> list[str]:
        """Return a list of what is wrong with a checkpoint's files; each rank reads some of them. Collective."""
        rank, world_size = self.ranks.rank_and_size()
        by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
        problems: list[str | None] = []
        with self.ranks.together(f"verifying {folder}"):
            problems = [file_problem(folder / name, record) for name, record in by_size[rank::world_size]]
        every = chain.from_iterable(self.ranks.from_every_rank(problems))
        return [problem for problem in every if problem is not None]

    def _first_verified(self, candidates: Sequence[CheckpointInfo | Broken]) -> tuple[Reader | None, list[str]]:
        """Open the first checkpoint that can be verified; return its reader, and a text for each damaged one before."""
        broken: list[str] = []
        for candidate in candidates:
            if isinstance(candidate, Broken):
                problems = [candidate.problem]
            else:
                problems = self._problems(candidate.path, candidate.manifest)
                if not problems:
                    return Reader(candidate.path, False, candidate.manifest), broken
            broken.append(f"{candidate.path.name}: {'; '.join(problems)}")
            if self.ranks.rank_and_size()[0] == 0:
                warn_user(f"the checkpoint {candidate.path} is passed over: {'; '.join(problems)}")
        return None, broken

    def _inside(self, path: Location) -> Path:
        path = to_path(path, like=self.root)
        return self.root / path.name if len(path.parts) == 1 else path.absolute()


@dataclass(frozen=True)
class _FailedTries:
    """The tries of a save so far, which have all failed by errors that may be temporary."""

    tries: int
    attempt: int  # highest attempt number in the names of folders that these tries have written
    why: str

    @property
    def last(self) -> bool:
        return self.tries == len(PAUSES_S)

    def again(self, attempt: int, why: str) -> _FailedTries:
        return _FailedTries(self.tries + 1, attempt, why)

    def or_again(self, act: Callable[[], T], attempt: int) -> T | _FailedTries:
        """Call `act` and return its result; after a temporary error, return a record with one more failed try."""
        try:
            return act()
        except CheckpointError as error:
            if self.last or not passing(error):
                raise
            return self.again(attempt, str(error))


def _candidates(
    keyword: str,
    found: Sequence[CheckpointInfo | Broken],
    kind: str | None,
    rule: tuple[str | None, str | None],
    line: Line | None,
    holder: str | None,
) -> tuple[Sequence[CheckpointInfo | Broken], int]:
    """Return the checkpoints for a keyword in the order in which to try them, and the number of other runs there.

    The run that saved last is the run that last held the folder's lease. Serial numbers alone do not show this, since a
    copied checkpoint has a serial number of another folder.
    """
    whole = [one for one in found if isinstance(one, CheckpointInfo)]
    fitting = [one.manifest for one in whole if kind in (None, one.kind)]
    last = next((one for one in fitting if one.run_id == holder), next(iter(fitting), None))
    of_line = line or (None if last is None else Line.of(last))
    own = [one for one in whole if of_line is not None and of_line.has(one.manifest.run_id, one.step)]
    others = {one.manifest.run_id for one in whole if of_line is not None and not of_line.knows(one.manifest.run_id)}
    if keyword == "best":
        return best_first([one for one in own if kind in (None, one.kind)], *rule), len(others)
    if line is not None and not own:
        return [], len(others)
    mine = {one.path for one in own}
    tried = [one for one in found if isinstance(one, Broken) or one.path in mine]
    rest = [one for one in whole if one.path not in mine] if line is None else []
    return [one for one in (*tried, *rest) if isinstance(one, Broken) or kind in (None, one.kind)], len(others)


def _joined(
    parts: Sequence[tuple[int, dict[str, FileRecord]]], sizes: Mapping[str, int], folder: Path
) -> dict[str, FileRecord]:
    """Join the file records of all ranks, and check that rank 0 sees these files with the same sizes."""
    steps = {step for step, _ in parts}
    if len(steps) > 1:
        each = ", ".join(f"rank {rank}: {step}" for rank, (step, _) in enumerate(parts))
        raise DistributedError(f"the ranks save different steps ({each}); save() is called by all ranks at one step")
    records: dict[str, FileRecord] = {}
    for rank, (_, of_rank) in enumerate(parts):
        for name, record in of_rank.items():
            if name in records:
                raise CheckpointError(
                    f"{folder / name} was written by two ranks. Give each rank's file a name of its own.",
                    path=folder / name,
                )
            size = sizes.get(name)
            if size != record.bytes:
                raise CheckpointError(
                    f"rank {rank} wrote {name} with {record.bytes:,} bytes and rank 0 sees "
                    f"{'no such file' if size is None else f'{size:,} bytes'}. All ranks must see one file system: put "
                    f"the checkpoints on a shared one.",
                    path=folder / name,
                )
            records[name] = record
    return records
