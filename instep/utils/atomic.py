"""Atomic writes on a local disk: a reader sees the whole of a file, or what was there before."""

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
        # The link was made: the server's first answer was lost, and it was asked again.
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
    """Write a file under another name in a `with` block; it gets its own name if the block ends without an error.

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
    """Write a file or make a folder under another name in a `with` block; it gets its own name if that is still free.

    Raises:
        FileExistsError: something has the name; it stays as it is.
    """
    temporary = _beside(path)
    try:
        yield temporary
        if not temporary.is_dir():
            os.link(temporary, path)  # a link fails where there is a file, unlike a rename
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
    """Create a file exclusively without hard links: its name comes before its content."""
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
    """Return the name of a file until it is whole, which says who writes it."""
    return path.with_name(f"{path.name}.{threading.get_ident()}@{this_process()}")


def fsync(fd: int) -> None:
    """Wait until the disk has all that was written to an open file."""
    try:
        import fcntl  # late: not on every platform

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # only macOS has it: there fsync leaves the data in the drive's cache
    except (ImportError, AttributeError):
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL):
            raise
        os.fsync(fd)  # fsync is all that the file system has, such as a network's


def sync_path(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system knows no fsync of folders
            raise
    finally:
        os.close(fd)
