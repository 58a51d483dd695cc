"""All errors that instep raises.

    InstepError
    ├── SettingError (ValueError)             an argument is wrong, or two of them contradict each other
    ├── UsageError (RuntimeError)             a method was called where it cannot work
    │   └── StateError                        a state singleton was asked for settings that it does not have
    ├── HookError (TypeError)                 a user's hook is missing, or returned a wrong value
    ├── LogError (ValueError)                 `self.log` got a wrong value, or contradicts an earlier call
    ├── DataError (ValueError)                a loader or a batch cannot be used
    │   ├── LoaderWorkerError (RuntimeError)  a worker process of a loader has died
    │   ├── NotTensorError (TypeError)        a collective got an object that is not a tensor
    │   └── ShapeMismatchError (RuntimeError)  tensors that are to be joined have different shapes
    ├── NonFiniteError (FloatingPointError)   the loss or a gradient is nan or inf, under nonfinite="stop"
    ├── TrainingSpikeError (RuntimeError)     SpikeDetection found a jump of the loss
    ├── MissingPackageError (ImportError)     an optional package is missing or too old
    ├── CheckpointError (RuntimeError)        a checkpoint could not be written or read
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CorruptCheckpointError            a file is missing, too short, or its checksum differs
    │   ├── UnsavableStateError (TypeError)   a state holds an object that cannot be encoded without pickle
    │   ├── FolderInUseError                  another run saves its checkpoints in the same folder
    │   └── LeaseLostError                    another run has taken the folder over; this run must not write there
    └── DistributedError (RuntimeError)       processes disagree, or one of them failed
        └── RemoteError                       another rank raised an error; has its rank and traceback

    Preempted (SystemExit, code 75)           the run was asked to stop, saved itself, and can be resumed

`Preempted` is neither an `InstepError` nor an `Exception`, so that a script that catches exceptions around `fit` does
not go on to test a model whose training was cut short.
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
    """Base class of all errors of instep, except `Preempted`. Catch it to catch all of them.

    Control characters in the message are escaped, so that a name in it cannot control a terminal.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(_cleaned(arg) if isinstance(arg, str) else arg for arg in args))


class SettingError(InstepError, ValueError):
    """Raised when an argument or a setting has a wrong value. Give the value that the message asks for.

    Args:
        message: what is wrong, what was expected, and what to do.
        field: name of the argument; None if several arguments exclude each other.
        got: value of the argument. If it is, or contains, an object of another trainer's package, the message gets a
            hint on how to replace it.
    """

    def __init__(self, message: str, *, field: str | None = None, got: Any = None) -> None:
        super().__init__(f"{message}{_hint_of(got)}")
        self.field = field
        self.got = got


def _cleaned(text: str) -> str:
    if text.isprintable():
        return text
    from instep.utils.untrusted_files import clean  # imported late: needed only for an error

    return clean(text)


def _hint_of(got: Any) -> str:
    """Return a sentence on how to replace an object of another trainer's package; "" for any other object."""
    from instep.utils.porting import hint_of_object  # imported late: needed only for an error

    items = got if isinstance(got, list | tuple | set) else (got,)
    return next((f" {hint}." for item in items if (hint := hint_of_object(item))), "")


class UsageError(InstepError, RuntimeError):
    """Raised when a method is called at a place or time where it cannot work. Call it where the message says."""


class StateError(UsageError):
    """Raised when a state singleton, such as `PartialState`, is empty, or is asked for settings that it does not have.

    Build the state once, with all settings, before other code uses it.
    """


class HookError(InstepError, TypeError):
    """Raised when one of your hooks is missing, has a wrong signature, or returned a wrong value. Fix the hook."""


class LogError(InstepError, ValueError):
    """Raised when `self.log` gets a wrong value, or arguments that contradict an earlier call under the same name.

    Log a number or a tensor with one element, with the same arguments each time.
    """


class DataError(InstepError, ValueError):
    """Raised when a loader or a batch cannot be used. Fix the loader or the batch that the message names."""


class LoaderWorkerError(DataError, RuntimeError):
    """Raised when a worker process of a loader has died. The message says why, and what to change."""


class NotTensorError(DataError, TypeError):
    """Raised when a collective gets an object that is not a tensor. Use the collective that the message names."""


class ShapeMismatchError(DataError, RuntimeError):
    """Raised when tensors cannot be joined because their shapes differ. Pad them, as the message says."""


class NonFiniteError(InstepError, FloatingPointError):
    """Raised when the loss or a gradient is nan or inf, under `Trainer(nonfinite="stop")`.

    The weights were not updated, and the run has ended. Look at the samples of the `batches`, or lower the learning
    rate.

    Args:
        message: what was not finite, where, and what to do next.
        global_step: number of the optimizer step that was left out, counted as if it had been made.
        epoch: number of the epoch, from 0.
        batches: indices of this optimizer step's batches, counted from 0 in the epoch.
        ranks: ranks on which the loss was not finite; if all losses were finite, ranks on which a gradient was not.
        parameters: names of the parameters whose gradients were not finite.
        sample_indices: list with a dict for each rank, from a batch's index to the list of its samples' indices in the
            data set (None if they are unknown).
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
    """Raised by the callback `SpikeDetection` when the loss jumps. Look at the samples of the two `batches`.

    Args:
        message: the loss, the batch in which it jumped, and what to do next.
        global_step: number of the optimizer step that this batch belongs to.
        epoch: number of the epoch, from 0.
        batches: indices of the batch before the jump (if there is one) and of the batch with the jump, counted from 0
            in the epoch.
        ranks: ranks on which the loss jumped.
        sample_indices: list with a dict for each rank, from a batch's index to the list of its samples' indices in the
            data set (None if they are unknown).
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
        path: path of the file or folder; None: unknown.
    """

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = Path(path) if isinstance(path, str) else path


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Raised when there is no checkpoint at a path. Give the path of a checkpoint.

    With `ckpt_path="auto"`, a run without a checkpoint starts from the beginning.
    """


class CorruptCheckpointError(CheckpointError):
    """Raised when a file of a checkpoint is missing, too short, or has changed. Load an older checkpoint."""


class UnsavableStateError(CheckpointError, TypeError):
    """Raised when a state holds an object that cannot be saved without pickle. Keep only tensors and JSON values."""


class FolderInUseError(CheckpointError):
    """Raised when another run saves its checkpoints in the same folder. The message names its host, process and run.

    Give this run another folder, or wait until the other run has ended.
    """


class LeaseLostError(CheckpointError):
    """Raised when another run has taken over the checkpoint folder, because this run did not respond for too long.

    This run must not write there any more. End it, or start it again with another folder.
    """


class DistributedError(InstepError, RuntimeError):
    """Raised when processes disagree, or when one of them failed. The message says which ranks, and about what."""


class RemoteError(DistributedError):
    """Raised when another rank raised an error. Read the traceback of that rank at the end of the message.

    Args:
        message: name of the operation that failed.
        rank: rank that raised the error.
        traceback: traceback of that rank, as text.
    """

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(f"{message}\n\nTraceback of rank {rank}:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class Preempted(SystemExit):
    """Raised when a run was asked to stop (a signal, the trigger "preempted"), saved itself, and can be resumed.

    If it is not caught, the process ends with exit status 75. Run the same command again to continue the run.

    Args:
        message: what happened, and how to continue.
        checkpoint: path of the checkpoint to resume from.
    """

    def __init__(self, message: str, checkpoint: Path | None = None) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return self.message


# for errors about a rank whose loss would reduce no gradients
OTHERS_WAIT = "With several processes the others would wait: compute the loss from the model's output, times 0."


def one_of(field: str, got: Any, allowed: Iterable[Any]) -> SettingError:
    """Return the error for a value that is not allowed; the message has the nearest allowed value, if one is close.

    Args:
        field: name of the argument.
        got: value that was given.
        allowed: values that are allowed.

    Returns:
        The error, which the caller raises.

    Example:
        >>> print(one_of("mode", "mim", ("min", "max")))
        mode='mim' is not known. Use one of: min, max. Did you mean 'min'?
    """
    from instep.utils.porting import OTHER_NAMES  # imported late: needed only for an error

    names, text = [str(value) for value in allowed], str(got)
    # get_close_matches returns the nearest name first; a typing error rarely changes the beginning or length of a name
    near = get_close_matches(text, names)
    near.sort(key=lambda name: (not name.startswith(text), name[:1] != text[:1], abs(len(name) - len(text))))
    known = OTHER_NAMES.get(field, {}).get(text.lower())
    near = [known] if known in names else near
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return SettingError(f"{field}={got!r} is not known. Use one of: {', '.join(names)}.{hint}", field=field, got=got)
