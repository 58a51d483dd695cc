"""`AcceleratorState` and `GradientState`: read-only views of the active run."""

from __future__ import annotations

from typing import Any, NoReturn

from instep.errors import StateError, one_of
from instep.state.partial import PartialState
from instep.state.runs import MIXED_PRECISIONS, GradientRecord, Run, active_run


class AcceleratorState(PartialState):
    """The process state, and the precision and strategy of the active run.

    This class is a read-only view. A Trainer sets the values for the time of its fit, validate, test or predict, an
    Accelerator for its lifetime. So several Trainers and Accelerators in one program never disturb each other.

    Args:
        mixed_precision: precision that the active run must have ("no", "fp16", "bf16" or "fp8"); None accepts any.
        cpu: as in `PartialState`.
        debug: as in `PartialState`.
        **init_process_group_kwargs: as in `PartialState`.

    Raises:
        SettingError: an argument is wrong.
        StateError: the active run or the process state has another value, or there is no active run to compare with.

    Example:
        >>> AcceleratorState().initialized  # outside any run
        False
    """

    __slots__ = ()

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool | None = None,
        debug: bool | None = None,
        **init_process_group_kwargs: Any,
    ) -> None:
        # This check comes before the process state is built, since after an error no process state must remain.
        if mixed_precision is not None:
            if mixed_precision not in MIXED_PRECISIONS:
                raise one_of("mixed_precision", mixed_precision, MIXED_PRECISIONS)
            run = _run()
            if mixed_precision != run.mixed_precision:
                raise StateError(
                    f"AcceleratorState was asked for mixed_precision={mixed_precision!r}, but the active run "
                    f"({run.name}) holds mixed_precision={run.mixed_precision!r}. Set it where that run is made."
                )
        super().__init__(cpu, debug, **init_process_group_kwargs)

    @property
    def initialized(self) -> bool:
        """Whether the process state is set and a run is active."""
        return active_run() is not None and super().initialized

    @property
    def mixed_precision(self) -> str:
        """Precision of the active run: "no", "fp16", "bf16" or "fp8"."""
        return _run().mixed_precision

    @property
    def plugin(self) -> Any:
        """Strategy of the active run, with its settings."""
        return _run().plugin

    @property
    def deepspeed_plugin(self) -> Any:
        """Strategy of the active run if it is DeepSpeed, else None. An Accelerator never has DeepSpeed."""
        plugin = _run().plugin
        return plugin if getattr(plugin, "name", "") == "deepspeed" else None

    @property
    def _writer(self) -> str:
        return "the Trainer or the Accelerator sets it for its run"


class GradientState:
    """Position of the active run in its accumulation window and its loader.

    Any code can read this view; only the loop of the run writes the values. Outside of runs, every backward counts as a
    whole accumulation window, and no loader is active.

    Example:
        >>> GradientState().sync_gradients
        True

    Source:
        Names and meaning are those of Hugging Face Accelerate's GradientState.
    """

    __slots__ = ()

    @property
    def initialized(self) -> bool:
        """Whether there is an active run."""
        return active_run() is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the running micro-batch ends its accumulation window."""
        return _gradient().sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per accumulation window."""
        return _gradient().num_steps

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the running micro-batch is the last of the active loader."""
        return _gradient().end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples, without padding, in the last global batch; -1 if unknown."""
        return _gradient().remainder

    @property
    def active_dataloader(self) -> Any:
        """Innermost loader that is iterated now; None outside of loops."""
        return _gradient().active_dataloader

    @property
    def dataloader_references(self) -> list[Any]:
        """All loaders that are iterated now, outermost first, in a new list."""
        return list(_gradient().dataloader_references)

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is iterated now."""
        return _gradient().active_dataloader is not None

    @property
    def adjust_scheduler(self) -> bool:
        """Whether an optimizer step advances a schedule by its number of accumulated batches, instead of by one."""
        return _gradient().adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether an accumulation window ends at the end of its loader."""
        return _gradient().sync_with_dataloader

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA has reduced the gradients of this accumulation window."""
        return _gradient().is_xla_gradients_synced

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        run = active_run()
        writer = f"the loop of {run.name} writes it" if run else "the loop of a Trainer or an Accelerator writes it"
        raise AttributeError(
            f"GradientState.{name} cannot be assigned: {writer}. It can only be read (tried to assign {value!r})."
        )

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )


_IDLE = GradientRecord()


def _run() -> Run:
    run = active_run()
    if run is None:
        raise StateError(
            "there is no active run: precision and plugin belong to a Trainer's fit, validate, test or predict, or to "
            "an Accelerator. Read them there; PartialState has what belongs to the process."
        )
    return run


def _gradient() -> GradientRecord:
    run = active_run()
    return _IDLE if run is None else run.gradient
