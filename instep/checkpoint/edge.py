"""The edge of a reader: whatever a file's content makes of the code behind it becomes one error with the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.errors import CheckpointError, CorruptCheckpointError, InstepError


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the block into those of a checkpoint.

    For code that takes values out of a file as they come: what of it is of the wrong kind shows as any error. The cause
    stays at the new one.

    Args:
        path: the file or folder.
        what: what could not be done with it, as in "is not a whole file of torch.save".

    Raises:
        CheckpointError: it cannot be read, or needs more memory than there is.
        CorruptCheckpointError: anything else but an error of instep's, which passes as it is.
    """
    try:
        yield
    except InstepError:
        raise
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than there is", path=path) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise CorruptCheckpointError(f"{path} {what}: {type(error).__name__}: {reason}", path=path) from error
