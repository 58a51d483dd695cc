"""Atomic writes on a local disk: a reader sees the complete new file, or the complete old one."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.utils.process_id import this_process

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def create_exclusive(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Create a file with its content, which is on the disk on return; False if the file exists.

    Args:
        path: of the file.
        data: its content.
        mode: its permissions, before the umask.
    """
    temporary = _write_beside(path, data, mode, sync=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # The link exists: the server made it, its first answer was lost, and the client asked again.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, data, mode)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace(path: Path, data: bytes) -> None:
    """Replace the content of a small file; after a power loss it may be the old content."""
    temporary = _write_beside(path, data)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """Write a file under another name in a `with` block; rename it at the end of the block, if there was no error.

    Args:
        path: of the file, which may be there.
        sync: wait until the disk has it.

    Example:
        >>> with replacing(Path("table.csv")) as part:  # doctest: +SKIP
        ...     part.write_text("step,loss")
    """
    temporary = _beside(path)
    try:
        yield temporary
        if sync:
            sync_path(temporary)
        os.replace(temporary, path)
        if sync:
            sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def creating(path: Path) -> Iterator[Path]:
    """Write a file or folder under another name in a `with` block; rename it at the end, if its name is still free.

    Raises:
        FileExistsError: something has the name; it stays as it is.
    """
    temporary = _beside(path)
    try:
        yield temporary
        if not temporary.is_dir():
            os.link(temporary, path)  # a link fails if the file exists; a rename would replace it
        elif path.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(path))
        else:
            temporary.rename(path)
        sync_path(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _create_without_links(path: Path, data: bytes, mode: int) -> bool:
    """Create a file exclusively without hard links; for a moment the file exists with no content."""
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _write_beside(path: Path, data: bytes, mode: int = 0o666, sync: bool = False) -> Path:
    temporary = _beside(path)
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            if sync:
                file.flush()
                fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _beside(path: Path) -> Path:
    """Return the temporary name of an unfinished file; it says which process writes it."""
    return path.with_name(f"{path.name}.{threading.get_ident()}@{this_process()}")


def fsync(fd: int) -> None:
    """Wait until all writes to an open file are on the disk."""
    try:
        import fcntl  # imported late: not on every platform

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # macOS only: there fsync leaves the data in the drive's cache
    except (ImportError, AttributeError):
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL):
            raise
        os.fsync(fd)  # the file system, such as a network's, supports only fsync


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no fsync of folders
            raise
    finally:
        os.close(fd)
