"""Every error that instep raises.

    InstepError
    ├── SettingError (ValueError)             an argument is wrong, or two of them contradict each other
    ├── UsageError (RuntimeError)             a method was called where it cannot work
    │   └── StateError                        a state singleton was asked for something else than it holds
    ├── HookError (TypeError)                 a user's hook is missing or returned what it must not
    ├── LogError (ValueError)                 `self.log` got a wrong value, or contradicts an earlier call
    ├── DataError (ValueError)                a loader or a batch cannot be used
    │   ├── LoaderWorkerError (RuntimeError)  a worker process of a loader has died
    │   ├── NotTensorError (TypeError)        a collective got what is no tensor
    │   └── ShapeMismatchError (RuntimeError)  tensors that are to be joined have other shapes
    ├── NonFiniteError (FloatingPointError)   the loss or a gradient is nan or inf, and the run was to stop then
    ├── TrainingSpikeError (RuntimeError)     SpikeDetection found a jump of the loss
    ├── MissingPackageError (ImportError)     an optional package is missing or too old
    ├── CheckpointError (RuntimeError)        a checkpoint could not be written or read
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CorruptCheckpointError            a file is missing, too short, or its checksum differs
    │   ├── UnsavableStateError (TypeError)   a state holds an object that cannot be encoded without pickle
    │   ├── FolderInUseError                  another run saves its checkpoints there
    │   └── LeaseLostError                    another run has taken the folder over; this one must not write any more
    └── DistributedError (RuntimeError)       processes disagree, or one of them failed
        └── RemoteError                       another rank raised: its rank and traceback

    Preempted (SystemExit, code 75)           the run was asked to stop, saved itself, and can be resumed

`Preempted` is not an `InstepError` and not an `Exception`: a script that catches exceptions around `fit` must not
go on to test a model whose training was cut short.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

EXIT_FAILED = 1
EXIT_PREEMPTED = 75
EXIT_HUNG = 76


class InstepError(Exception):
    """Base of every error of instep. Catch it to catch all of them, except `Preempted`.

    Its text holds nothing that a terminal would obey: control characters of the names in it are escapes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(_cleaned(arg) if isinstance(arg, str) else arg for arg in args))


class SettingError(InstepError, ValueError):
    """Raised when an argument or a setting has a wrong value. Give the value that the message asks for.

    Args:
        message: what was wrong, what was expected and what to do.
        field: the argument's name; None where several arguments do not go together.
        got: the value of that argument; where it is another package's, or holds such a thing, the message gets a hint.
    """

    def __init__(self, message: str, *, field: str | None = None, got: Any = None) -> None:
        super().__init__(f"{message}{_hint_of(got)}")
        self.field = field
        self.got = got


def _cleaned(text: str) -> str:
    if text.isprintable():
        return text
    from instep.utils.untrusted_files import clean  # imported late: it imports this module

    return clean(text)


def _hint_of(got: Any) -> str:
    """Return a sentence about the replacement of another trainer's object; "" if `got` is no such object."""
    from instep.utils.porting import hint_of_object  # imported late: only an error reads these tables

    items = got if isinstance(got, list | tuple | set) else (got,)
    return next((f" {hint}." for item in items if (hint := hint_of_object(item))), "")


class UsageError(InstepError, RuntimeError):
    """Raised when a method is called where it cannot work. Call it at the place that the message names."""


class StateError(UsageError):
    """Raised when a state singleton, such as `PartialState`, is asked for other settings than it has, or holds nothing.

    Build the state once, with all its settings, before anything else uses it.
    """


class HookError(InstepError, TypeError):
    """Raised when a hook of yours is missing, has a wrong signature, or returned a wrong value. Fix that hook."""


class LogError(InstepError, ValueError):
    """Raised when `self.log` gets a wrong value, or arguments that contradict an earlier call under the same name.

    Log a number or a tensor with one element, with the same arguments each time.
    """


class DataError(InstepError, ValueError):
    """Raised when a loader or a batch cannot be used. Fix the loader or the batch that the message names."""


class LoaderWorkerError(DataError, RuntimeError):
    """Raised when a worker process of a loader has died. The message says by what, and what to change."""


class NotTensorError(DataError, TypeError):
    """Raised when a collective gets something that is no tensor. Use the one for objects that the message names."""


class ShapeMismatchError(DataError, RuntimeError):
    """Raised when tensors that are to be joined have shapes that do not fit. Pad them, as the message says."""


class NonFiniteError(InstepError, FloatingPointError):
    """Raised when the loss or a gradient is nan or inf, under `Trainer(nonfinite="stop")`.

    The update was left out, and the run has ended. Look at the batches that the attributes name, or lower the learning
    rate.

    Args:
        message: what was not finite, where, and what to do next.
        global_step: the optimizer step, counted as if it had been made.
        epoch: from 0.
        batches: numbers of the window's batches in the epoch, from 0.
        ranks: where the loss was not finite; where all losses were finite, those with such gradients.
        parameters: names of those whose gradients were not finite.
        sample_indices: by rank: the data set's indices of each of the batches; None where unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        global_step: int,
        epoch: int,
        batches: range,
        ranks: list[int],
        parameters: list[str],
        sample_indices: list[dict[int, list[Any] | None]],
    ) -> None:
        super().__init__(message)
        self.global_step = global_step
        self.epoch = epoch
        self.batches = batches
        self.ranks = ranks
        self.parameters = parameters
        self.sample_indices = sample_indices


class TrainingSpikeError(InstepError, RuntimeError):
    """Raised by the callback `SpikeDetection` when the loss jumps. Look at the batches that the attributes name.

    Args:
        message: the loss, where, and what to do next.
        global_step: the optimizer step of the batch.
        epoch: from 0.
        batches: number in the epoch of the batch before and of the batch itself, from 0.
        ranks: where the loss jumped.
        sample_indices: by rank: the data set's indices of each of the batches; None where unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        global_step: int,
        epoch: int,
        batches: range,
        ranks: list[int],
        sample_indices: list[dict[int, list[Any] | None]],
    ) -> None:
        super().__init__(message)
        self.global_step = global_step
        self.epoch = epoch
        self.batches = batches
        self.ranks = ranks
        self.sample_indices = sample_indices


class MissingPackageError(InstepError, ImportError):
    """Raised when an optional package is missing or has a wrong version. Run the `pip install` of the message."""


class CheckpointError(InstepError, RuntimeError):
    """Raised when a checkpoint cannot be written or read. The message says why, and `path` says where.

    Args:
        message: what happened.
        path: the file or folder; None where none is known.
    """

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = Path(path) if isinstance(path, str) else path


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Raised when there is no checkpoint at a path. Give a path that has one.

    With `ckpt_path="auto"` a run without a checkpoint starts afresh.
    """


class CorruptCheckpointError(CheckpointError):
    """Raised when a file of a checkpoint is missing, too short, or not as it was written. Load an older checkpoint."""


class UnsavableStateError(CheckpointError, TypeError):
    """Raised when a state holds an object that cannot be saved without pickle. Keep only tensors and JSON values."""


class FolderInUseError(CheckpointError):
    """Raised when another run saves its checkpoints in the same folder. The message names its host, process and run.

    Give this run another folder, or wait until the other run has ended.
    """


class LeaseLostError(CheckpointError):
    """Raised when another run took the folder of checkpoints over, because this run did not answer for too long.

    This run must not write there any more: end it, or start it again with another folder.
    """


class DistributedError(InstepError, RuntimeError):
    """Raised when processes disagree, or one of them failed. The message says which ranks, and in what."""


class RemoteError(DistributedError):
    """Raised when another rank raised an error. Read the traceback of that rank, which the message ends with.

    Args:
        message: the operation that failed.
        rank: the rank that raised.
        traceback: the traceback of that rank, as text.
    """

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(f"{message}\n\nTraceback of rank {rank}:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class Preempted(SystemExit):
    """Raised when a run was asked to stop (a signal, the trigger "preempted"), saved itself, and can be resumed.

    Uncaught, it ends the process with exit status 75. Run the same command again to go on.

    Args:
        message: what happened and how to go on.
        checkpoint: the checkpoint to resume from.
    """

    def __init__(self, message: str, checkpoint: Path | None = None) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return self.message


def one_of(field: str, got: Any, allowed: Iterable[Any]) -> SettingError:
    """Make the error for a value outside a closed set. The error names the nearest allowed value, if one is close.

    Args:
        field: name of the argument.
        got: the value.
        allowed: the values that the argument may have.

    Returns:
        The error, to be raised.

    Example:
        >>> print(one_of("mode", "mim", ("min", "max")))
        mode='mim' is not known. Use one of: min, max. Did you mean 'min'?
    """
    from instep.utils.porting import OTHER_NAMES  # imported late: only an error reads these tables

    names, text = [str(value) for value in allowed], str(got)
    # get_close_matches returns the nearest name first; a typing error seldom changes a name's beginning or length
    near = get_close_matches(text, names)
    near.sort(key=lambda name: (not name.startswith(text), name[:1] != text[:1], abs(len(name) - len(text))))
    known = OTHER_NAMES.get(field, {}).get(text.lower())
    near = [known] if known in names else near
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return SettingError(f"{field}={got!r} is not known. Use one of: {', '.join(names)}.{hint}", field=field, got=got)
