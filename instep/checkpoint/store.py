"""A folder of checkpoints, which are saved completely or not at all, found by scanning, and verified before use."""

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
    """Checkpoints of one folder.

    Methods marked *collective* must be called by all ranks, and return the same on each: rank 0 looks at the disk and
    tells the others. All other methods are local. With several nodes the folder must be on a shared file system.

    Args:
        root: the folder, or its URL ("s3://bucket/run"). The first save creates it.
        files: the file operations, in which a test can inject faults. Default: those of the root's file system.
        ranks: the ranks that act together. Default: all of them, on the training thread.
        lease: right to write there, which rank 0 checks before every commit and deletion. Without one, the caller must
            make sure that nobody else writes there.

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
        self.root = to_path(root).absolute()  # a later chdir must not move it
        self.files = files if files is not None else files_of(self.root)
        self.ranks = ranks if ranks is not None else RankGroup()
        self.lease = lease

    def own(self, run_id: str) -> None:
        """Take the folder, and create it if necessary. `lease.release()` gives it back. Collective: all ranks call it.

        This also proves that the folder can be written to and that all ranks see it.

        Args:
            run_id: the run that saves.

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
        """Save a checkpoint. When this returns, all of it is on the disk; after an error, nothing of it is left.

        Collective.

        Every rank calls `write`, which must not wait for another rank. If it raises on any rank, or the disk is full,
        the save fails on all of them, what was written is removed, and the older checkpoints are untouched. After a
        fault that may pass by itself (of a network or server), a warning is given, and after a pause all ranks call
        `write` again for another folder, at most twice.

        Args:
            step: the global step; the same on every rank.
            write: function that writes this rank's files.
            info: JSON values to keep in the manifest: kind ("full" or "weights"), epoch, monitor, mode, score, ...
                Rank 0's are taken.
            name: the folder's name before "-<attempt>"; default "step-<8 digits>".
            run_id: the run that saves.
            line: line of the run, in place of `run_id`.

        Returns:
            The folder.

        Raises:
            CheckpointError: the checkpoint could not be written; the text has path and bytes.
            UnsavableStateError: a state holds something that cannot be encoded.
            RemoteError: another rank failed; the text has that rank's traceback.
        """
        saved: Path | _FailedTries = _FailedTries(0, 0, "")
        line = Line(run_id) if line is None else line
        while isinstance(saved, _FailedTries):
            saved = self._try(step, write, info or {}, name, line, saved)
        return saved

    def scan(self) -> list[CheckpointInfo]:
        """List the checkpoints with a readable manifest, last saved first. Local.

        Returns:
            The checkpoints; empty if the folder does not exist.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        return [found for found in list_checkpoints(self.root) if isinstance(found, CheckpointInfo)]

    def last_run(self) -> str | None:
        """Return the run that held the folder last, before this process took it; None if unknown. Collective."""
        return self.ranks.on_rank_zero(lambda: last_run(self.root, self.files), f"looking for the lease of {self.root}")

    def verify(self, path: Location) -> list[str]:
        """List what is wrong with a checkpoint; empty if every byte of it is as it was written. Local."""
        return folder_problems(self._inside(path))

    def verify_together(self, path: Location) -> list[str]:
        """List what is wrong with a checkpoint; each file is read by one rank. Collective: all ranks call it."""
        folder = self._inside(path)
        manifest, problem = self.ranks.on_rank_zero(lambda: read_or_say(folder), f"verifying {folder}")
        return [problem] if manifest is None else self._problems(folder, manifest)

    def open_verified(self, path: Location) -> Reader:
        """Open a checkpoint after verifying all of it, each file by one rank. Collective: all ranks call it.

        Args:
            path: the folder, or its name in this store.

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
        """Open the newest checkpoint that verifies. Collective: all ranks call it.

        Newer ones that do not verify are skipped, with a warning that says what is wrong.

        Args:
            kind: "full" or "weights"; None takes both.
            job: job in the checkpoints' manifests; None takes all.
            also: further folders to look in.

        Returns:
            A reader of the checkpoint; None if there is none.
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
        """Open the checkpoint that a keyword means. It has always verified. Collective: all ranks call it.

        Args:
            keyword: "last": the one saved last. "best": by the score in the manifests; nan is never the best. "auto":
                like "last", but None if there is nothing to continue from.
            kind: "full" or "weights"; None takes both, and only "full" for "auto".
            monitor: metric for "best", if the checkpoints were scored by several.
            mode: "min" or "max", if they were scored by both.
            line: line of the run to which the search is limited. Default: the run that saved last; if none of its
                checkpoints verifies, other runs follow for "last" and "auto".
            also: further folders to look in.

        Returns:
            A reader that does not verify the files again; None only for "auto".

        Raises:
            SettingError: the keyword is unknown.
            CorruptCheckpointError: there are such checkpoints, and none of them verifies.
            CheckpointNotFoundError: there is no such checkpoint ("last" and "best").
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
        # an error and not None, since a run would begin again at step 0 beside checkpoints that may be repaired
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
        """Open a checkpoint. Local: the process verifies each file when it first reads it.

        Args:
            path: the folder, or its name in this store.
            verify: whether to verify files. Pass False only if this job has verified the checkpoint.

        Raises:
            CheckpointNotFoundError: the folder has no manifest.
            CorruptCheckpointError: the manifest is damaged.
        """
        return Reader(self._inside(path), verify)

    def delete(self, path: Location) -> None:
        """Delete a checkpoint: it vanishes at one instant, then is removed. Do nothing if it is gone. Collective.

        Raises:
            CheckpointError: the checkpoint is not in this store, or could not be removed.
        """
        folder = self._inside(path)
        self.ranks.on_rank_zero(lambda: self._delete(folder), f"deleting {folder}")

    def sweep(self, of_other_hosts: bool = False) -> list[Path]:
        """Remove what dead processes have left. Collective: all ranks call it.

        Args:
            of_other_hosts: whether to also remove what processes of other hosts have left, although they may still be
                writing. Only for the owner of a folder to which nobody else can be writing.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: something could not be removed.
        """
        return self.ranks.on_rank_zero(lambda: self._sweep(of_other_hosts), f"sweeping {self.root}")

    def clean_stale(self) -> None:
        """Sweep, and only warn if that fails, since a save must not fail because of it. Collective."""
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
        """Try to save once. After a passing fault, all ranks learn of it by the same messages.

        The last try raises it.
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

    # The next methods run on rank 0 only.

    def _begin(self, step: int, name: str | None, before: _FailedTries) -> tuple[Path, Path, int]:
        if before.tries:
            wait(
                PAUSES_S[before.tries - 1],
                f"saving step {step} failed, and is tried again in another folder: {before.why}",
            )
        base = names.base_name(step, name)
        self._check_lease()  # raises if the folder was taken over, so that it is not created again
        try:
            self.files.make_root(self.root)
            # All saves of a step are numbered together, so that folders with other names have a certain order too.
            used = [other.attempt for other in facts(self.root, by_name=True) if other.step == step]
            used += [parts[1] for parts in map(names.split_name, folder_names(self.root)) if parts and parts[0] == base]
            attempt = max([*used, before.attempt]) + 1
            while True:
                final = self.root / f"{base}-{attempt}"
                try:
                    return self.files.begin(final), final, attempt
                except FileExistsError:  # another save has just created it
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
        """Return a number above those of all saves of the run and of the folder, which its owner scans only once."""
        known = None if self.lease is None else self.lease.serial
        if known is None:
            known = max((other.serial for other in facts(self.root)), default=0)  # includes copied checkpoints
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
        """Remove a folder during another error, which a second error must not hide.

        Args:
            folder: folder that a save wrote to.
            renamed: folder that it may have been renamed to; it is not known whether the disk has the rename. None if
                not renamed.
        """
        try:
            self.files.delete(folder if renamed in (None, folder) or folder.exists() else renamed)
        except OSError as error:
            warn_user(f"could not remove {folder}, which a failed save left: {error}. The next sweep() removes it.")

    # The next methods run on all ranks.

    def _problems(self, folder: Path, manifest: Manifest) -> list[str]:
        """List what is wrong with the files of a checkpoint; each is read by one rank. Collective."""
        rank, world_size = self.ranks.rank_and_size()
        by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
        problems: list[str | None] = []
        with self.ranks.together(f"verifying {folder}"):
            problems = [file_problem(folder / name, record) for name, record in by_size[rank::world_size]]
        every = chain.from_iterable(self.ranks.from_every_rank(problems))
        return [problem for problem in every if problem is not None]

    def _first_verified(self, candidates: Sequence[CheckpointInfo | Broken]) -> tuple[Reader | None, list[str]]:
        """Open the first candidate that verifies, and return what is wrong with each one before it."""
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
    """Tries of a save so far, all of which failed by faults that may pass by themselves."""

    tries: int
    attempt: int  # highest attempt number that was used
    why: str

    @property
    def last(self) -> bool:
        return self.tries == len(PAUSES_S)

    def again(self, attempt: int, why: str) -> _FailedTries:
        return _FailedTries(self.tries + 1, attempt, why)

    def or_again(self, act: Callable[[], T], attempt: int) -> T | _FailedTries:
        """Call `act`; return its result, or a record that another try is needed."""
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
    """Return the checkpoints that a keyword may mean, in the order to try, and the number of other runs.

    The run that saved last is the one that last held the folder. Serial numbers alone do not show this, since a copied
    checkpoint has the number of another folder.
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
    """Join the records of all ranks, and compare them with what rank 0 sees."""
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
