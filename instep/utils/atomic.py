"""Write files atomically on a local disk: a reader sees either the complete new file or the complete old one."""

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
    """Create a file with its content, and wait until it is on the disk; return False if the file exists already.

    Args:
        path: path of the file.
        data: content of the file.
        mode: permissions of the file, to which the umask is applied.
    """
    temporary = _write_beside(path, data, mode, sync=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On a network file system, link() may fail although it has made the link: the server's first answer was lost.
        # Then `temporary` has two names.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, data, mode)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace(path: Path, data: bytes) -> None:
    """Replace the content of a small file atomically; after a power loss, the file may have the old content."""
    temporary = _write_beside(path, data)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, sync: bool = True) -> Iterator[Path]:
    """Replace a file atomically: yield a temporary path to write to, which is renamed after the `with` block.

    If the block raises an error, the temporary file is removed, and the file at `path` is not changed.

    Args:
        path: path of the file, which may exist.
        sync: whether to wait until the file is on the disk.

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
    """Create a file or folder atomically: yield a temporary path to write to, renamed after the `with` block.

    Raises:
        FileExistsError: a file or folder with the final name exists; it is not changed.
    """
    temporary = _beside(path)
    try:
        yield temporary
        if not temporary.is_dir():
            os.link(temporary, path)  # unlike a rename, os.link fails if the file exists
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
    """Create a file exclusively on a file system without hard links; the new file is empty for a moment."""
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
    """Return a temporary path beside a file; its name contains the id of this process."""
    return path.with_name(f"{path.name}.{threading.get_ident()}@{this_process()}")


def fsync(fd: int) -> None:
    """Wait until all writes to an open file are on the disk."""
    try:
        import fcntl  # imported late: Windows does not have it

        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # macOS, where fsync leaves data in the drive's cache
    except (ImportError, AttributeError):
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL):
            raise
        os.fsync(fd)  # some file systems do not support F_FULLFSYNC


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support fsync of folders
            raise
    finally:
        os.close(fd)
