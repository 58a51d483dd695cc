"""Every error that instep raises.

    InstepError
    ├── SettingError (ValueError)             an argument is wrong, or two of them contradict each other
    ├── UsageError (RuntimeError)             a method was called where it cannot work
    │   └── StateError                        a state singleton was asked for something else than it holds
    ├── HookError (TypeError)                 a user's hook is missing or returned what it must not
    ├── LogError (ValueError)                 `self.log` got a wrong value, or contradicts an earlier call
    ├── DataError (ValueError)                a loader or a batch cannot be used
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
    """The base of every error below."""


class SettingError(InstepError, ValueError):
    """A setting is wrong.

    Args:
        message: what was wrong, what was expected and what to do.
        field: the argument's name, when one argument is to blame.
        got: its value.
    """

    def __init__(self, message: str, *, field: str | None = None, got: Any = None) -> None:
        super().__init__(message)
        self.field = field
        self.got = got


class UsageError(InstepError, RuntimeError):
    """A method was called where it cannot work."""


class StateError(UsageError):
    """A state singleton was asked for something else than it holds."""


class HookError(InstepError, TypeError):
    """A hook is missing, has a wrong signature, or returned what it must not."""


class LogError(InstepError, ValueError):
    """`self.log` got a wrong value, or arguments that contradict an earlier call under the same name."""


class DataError(InstepError, ValueError):
    """A loader or a batch cannot be used."""


class NonFiniteError(InstepError, FloatingPointError):
    """The loss or a gradient is nan or inf. `Trainer(nonfinite="stop")` left the update out and ended the run.

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
    """The loss jumped, and the callback SpikeDetection ended the run.

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
    """An optional package is not installed, or in a version that does not fit; the text has the `pip install`."""


class CheckpointError(InstepError, RuntimeError):
    """A checkpoint could not be written or read.

    Args:
        message: what happened.
        path: the file or folder.
    """

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = Path(path) if isinstance(path, str) else path


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint does not verify: a file is missing, too short, or its checksum differs."""


class UnsavableStateError(CheckpointError, TypeError):
    """A state holds an object that cannot be encoded without pickle."""


class FolderInUseError(CheckpointError):
    """Another run saves its checkpoints in the folder; the text names its host, process and run."""


class LeaseLostError(CheckpointError):
    """Another run has taken the folder of checkpoints over while this one did not answer; it must not write there."""


class DistributedError(InstepError, RuntimeError):
    """Processes disagree, or one of them failed."""


class RemoteError(DistributedError):
    """Another rank raised.

    Args:
        message: what was being done.
        rank: the rank that raised.
        traceback: its traceback as text.
    """

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(f"{message}\n\nTraceback of rank {rank}:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class Preempted(SystemExit):
    """The run was asked to stop (a signal or the `preempted` trigger), saved itself, and can be resumed.

    Uncaught, it ends the process with exit status 75.

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
    from instep.utils.porting import OTHER_NAMES  # late: only an error reads these tables

    names, text = [str(value) for value in allowed], str(got)
    near = get_close_matches(text, names)  # the closest first; a slip seldom changes how a name begins, or its length
    near.sort(key=lambda name: (not name.startswith(text), name[:1] != text[:1], abs(len(name) - len(text))))
    known = OTHER_NAMES.get(field, {}).get(text.lower())
    near = [known] if known in names else near
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return SettingError(f"{field}={got!r} is not known. Use one of: {', '.join(names)}.{hint}", field=field, got=got)
