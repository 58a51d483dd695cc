"""Atomic writes of small local files: leases, a run's status, keys, words between processes."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from instep.utils.process_id import this_process

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def create_exclusive(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Make a file with its content, on the disk when this returns; False where it exists.

    Args:
        path: of the file.
        data: its content.
        mode: its permissions, before the umask.
    """
    temporary = _write_beside(path, data, mode, sync=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return os.stat(temporary).st_nlink == 2  # it was made: the server lost the first answer, and was asked again
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, data, mode)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace(path: Path, data: bytes, sync: bool = False) -> None:
    """Give a file another content, on the disk when this returns if `sync` is set."""
    temporary = _write_beside(path, data, sync=sync)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _create_without_links(path: Path, data: bytes, mode: int) -> bool:
    """Create a file exclusively where there are no hard links; its content comes after its name."""
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _write_beside(path: Path, data: bytes, mode: int = 0o666, sync: bool = False) -> Path:
    temporary = path.with_name(f"{path.name}.{threading.get_ident()}@{this_process()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
