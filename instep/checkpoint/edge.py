"""The edge of a reader: whatever a file's content makes of the code behind it becomes one error with the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

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
    except (InstepError, BrokenPipeError):  # who reads what a command prints has had enough
        raise
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than there is", path=path) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise CorruptCheckpointError(f"{path} {what}: {type(error).__name__}: {reason}", path=path) from error


@contextmanager
def taking_up(path: Path, what: str) -> Iterator[None]:
    """Turn errors of an object that takes up its state into one of the checkpoint.

    Args:
        path: the checkpoint.
        what: whose state it is.

    Raises:
        CorruptCheckpointError: for what a state of the wrong kind makes of the code behind it. Errors of instep's and
            of the system pass as they are; so does RuntimeError among several ranks: it may be another rank's end.
    """
    try:
        yield
    except (InstepError, OSError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and distributed.is_available() and distributed.is_initialized():
            raise
        reason = " ".join(str(error).split())[:500]
        raise CorruptCheckpointError(
            f"{path} holds a state of {what} that cannot be taken up: {type(error).__name__}: {reason}. Resume from "
            "another checkpoint, or leave that part out by resume=Resume(...).",
            path=path,
        ) from error
