"""`BatchSizeFinder`: find the largest batch size that fits into memory by trying larger and larger batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from instep.callbacks.base import Callback, print_text
from instep.callbacks.guests.lr_finder import holders, near_names, refuse_twice
from instep.errors import SettingError, UsageError
from instep.utils.checks import TEXT, Check, at_least, is_number
from instep.utils.rank_zero import rank_zero_info
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MODES = ("power", "binsearch")
_MARGIN = Check(lambda value: is_number(value) and 0.0 <= value < 1.0, "a number from 0 to below 1")


class BatchSizeFinder(Callback):
    """Find the largest batch size that fits into memory, by trial steps that are undone afterwards.

    The batch size is an attribute of the module or datamodule, and its `..._dataloader` methods must read this
    attribute. For each size, the callback sets the attribute, makes the dataloaders again, and runs a few training and
    validation steps. If any rank runs out of memory, the size counts as too large on all ranks. At the end the
    attribute keeps the size that was found, and all other effects of the trial steps are undone. A resumed run keeps
    the size and does not search again.

    To search at other epochs too, call `scale_batch_size(trainer, module)` in `on_train_epoch_start` of a subclass.

    Args:
        mode: "power": double the size until memory runs out. "binsearch": double it, then search by bisection between
            the largest size that fitted and the smallest size that did not.
        steps_per_trial: number of optimizer steps, and of batches of each validation dataloader, for each size.
        init_val: the first size to try.
        max_trials: number of sizes after which the search ends. With "binsearch", only sizes that fit count.
        batch_arg_name: name of the attribute of the module, the datamodule or their `hparams` that holds the batch
            size, in samples per process.
        margin: fraction by which the size that "binsearch" found is reduced.
        max_val: the largest size to try.

    Attributes:
        optimal_batch_size: the size that was found; `init_val` before the search.

    Raises:
        SettingError: an argument is wrong.
        UsageError: (in the run) the dataloaders were passed to the Trainer and not made by methods that could read the
            attribute, there is no such attribute, or no size fits.

    Example:
        >>> BatchSizeFinder(mode="binsearch", margin=0.1).optimal_batch_size
        2
    """

    SUPPORTED_MODES = _MODES
    runs_first = True

    def __init__(
        self,
        mode: Literal["power", "binsearch"] | str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        mode = str(mode).lower()
        if mode not in _MODES:
            raise SettingError(f"`mode` should be either of {_MODES}, got {mode!r}", field="mode", got=mode)
        self.optimal_batch_size: int | None = at_least(1)("init_val", init_val)
        self._mode = mode
        self._steps_per_trial = at_least(1)("steps_per_trial", steps_per_trial)
        self._init_val = init_val
        self._max_trials = at_least(0)("max_trials", max_trials)
        self._batch_arg_name = TEXT("batch_arg_name", batch_arg_name)
        self._margin = _MARGIN("margin", margin)
        self._max_val = at_least(1)("max_val", max_val)
        self._found = False

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        refuse_twice(self, BatchSizeFinder, trainer)
        if not trainer.fast_dev_run:
            self._places(module, trainer.datamodule)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.scale_batch_size(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, module)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.scale_batch_size(trainer, module)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.scale_batch_size(trainer, module)

    def scale_batch_size(self, trainer: Trainer, module: TrainModule) -> None:
        """Search for the batch size now. Call it on all ranks, at the start of a run or of an epoch."""
        if trainer.fast_dev_run:
            warn_user("Skipping batch size scaler since `fast_dev_run` is enabled.")
            return
        trial = trainer.trial()
        if trial.repeats:
            return
        trial.check_batch_size()
        places = self._places(module, trainer.datamodule)
        before = [place() for place in places]
        size: int | None = None

        def fits(size: int) -> bool:
            _put(places, size)
            why = trial.out_of_memory(self._steps_per_trial)
            return not why

        def most() -> int | None:
            return trial.samples()

        try:
            with trial:
                _put(places, self._init_val)
                search = _Search(fits, most, lambda: trial.interrupted, self._init_val, self._max_trials, self._max_val)
                size = search.power() if self._mode == "power" else search.binsearch(self._margin)
        finally:
            for place, value in zip(places, before, strict=True):
                place(value)
        if size is None:
            return
        self.optimal_batch_size, self._found = size, True
        self.apply(module, trainer.datamodule)
        trial.reload_data()
        print_text(trainer, f"BatchSizeFinder: {self._batch_arg_name} set to {size}")

    def apply(self, module: TrainModule, datamodule: Any = None) -> None:
        """Set the `batch_arg_name` attribute to the batch size that was found; do nothing before the search."""
        if self._found and self.optimal_batch_size is not None:
            _put(holders(self._batch_arg_name, module, datamodule), self.optimal_batch_size)

    def _places(self, module: TrainModule, datamodule: Any) -> list[Callable[..., Any]]:
        """Return a function for each place that holds the batch size, as `holders` does; raise if there is none."""
        name = self._batch_arg_name
        places = holders(name, module, datamodule)
        if not places:
            raise UsageError(
                f"Field {name} not found in `model`, `datamodule`, nor their `hparams` attributes. Give one of them an "
                f"attribute {name} that its loader methods use, or name another by batch_arg_name=..."
                f"{near_names(name, module, datamodule)}"
            )
        if hasattr(module, name) and name in module.hparams:
            warn_user(
                f"Field `model.{name}` and `model.hparams.{name}` are mutually exclusive! Both are set to the size "
                "that is found; keep one of them, which the loaders use"
            )
        return places

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.optimal_batch_size} if self._found else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_batch_size, self._found = int(state_dict["batch_size"]), True
        if self._module is not None:  # set the size now, before the dataloaders are made
            self.apply(self._module, self._module.trainer.datamodule)


def _put(places: list[Callable[..., Any]], size: int) -> None:
    for place in places:
        place(size)


class _Search:
    """Search for the largest batch size that fits into memory.

    Args:
        fits: function that runs steps with a batch size and returns whether the steps fitted into memory.
        most: function that returns the largest possible number of samples in a batch of one rank; None while unknown.
        left: function that returns whether the run was interrupted; the search then ends.
        first: the first size to try.
        trials: `max_trials` of `BatchSizeFinder`.
        largest: `max_val` of `BatchSizeFinder`.
    """

    def __init__(
        self,
        fits: Callable[[int], bool],
        most: Callable[[], int | None],
        left: Callable[[], bool],
        first: int,
        trials: int,
        largest: int,
    ) -> None:
        self._fits, self._most, self._left = fits, most, left
        self._size, self._trials, self._largest = min(first, largest), trials, largest

    def power(self) -> int | None:
        """Find the largest size that fits by doubling; return None if the search was interrupted."""
        size, best, failed = self._size, None, None
        for count in range(1, self._trials + 1):
            if self._left():
                return None
            if self._fits(size):
                best = size
                larger = self._larger(size)
                if failed is not None or count == self._trials or larger == size:
                    break
                self._say(size, "succeeded", larger)
                size = larger
            else:
                failed = size
                self._say(size, "failed", size // 2 if best is None else best)
                if best is not None:
                    break
                size = self._smaller(size, size // 2)
        return self._found(best, failed)

    def binsearch(self, margin: float) -> int | None:
        """Find the largest size that fits by bisection, and subtract the margin; return None if interrupted."""
        size, best, failed, fitted = self._size, 0, None, 0
        while fitted < self._trials and (failed is None or failed - best > 1):
            if self._left():
                return None
            if self._fits(size):
                best, fitted = size, fitted + 1
                if fitted == self._trials:
                    break
                larger = self._larger(size) if failed is None else (best + failed) // 2
                if larger == size:
                    break
                self._say(size, "succeeded", larger)
            else:
                failed = size
                larger = self._smaller(size, max(1, (best + failed) // 2) if failed > 1 else 0)
                self._say(size, "failed", larger)
            size = larger
        found = self._found(best or None, failed)
        less = max(1, int(found * (1 - margin)))
        if less != found:
            rank_zero_info(f"Applying margin of {margin:.1%}, reducing batch size from {found} to {less}")
        return less

    def _larger(self, size: int) -> int:
        """Return the next size to try, at most twice `size`; return `size` itself if a larger batch is not possible."""
        most = self._most()
        if most is not None and size >= most:
            rank_zero_info(f"The batch size {size} is greater or equal than the length of your dataset: {most}.")
            return size
        if size >= self._largest:
            rank_zero_info(f"Reached the maximum batch size limit of {self._largest}. Stopping search.")
        return min(2 * size, self._largest)

    def _smaller(self, size: int, smaller: int) -> int:
        if smaller < 1:
            raise UsageError(
                f"memory does not suffice for a batch size of {size}, and there is no smaller one: the model itself "
                "may not fit, or something else holds memory."
            )
        return smaller

    def _say(self, size: int, how: str, to_try: int) -> None:
        rank_zero_info(f"Batch size {size} {how}, trying batch size {to_try}")

    def _found(self, best: int | None, failed: int | None) -> int:
        if best is None and failed is not None:
            raise UsageError(
                f"no batch size was found that fits: {failed} was the last of max_trials={self._trials} that did not. "
                "Begin with a smaller init_val, or allow more trials."
            )
        return self._size if best is None else best
