"""`TQDMProgressBar`: progress bars drawn by the package tqdm, like those of Lightning's callback of this name."""

from __future__ import annotations

import math
import os
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from instep.callbacks.progress.progress_bar import ProgressBar
from instep.utils.checks import at_least
from instep.utils.imports import require
from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from tqdm import tqdm as _tqdm

    from instep.callbacks.base import Trainer, TrainModule
else:  # in a notebook `tqdm.auto` draws the bar with ipywidgets
    _tqdm = require("tqdm.auto" if find_spec("ipywidgets") else "tqdm", extra=None, purpose="TQDMProgressBar").tqdm

_DIGITS = 5
_ON_COLAB = 20  # smallest number of batches between two refreshes, since a browser draws slowly


class Tqdm(_tqdm):
    """A tqdm bar whose numbers keep their width, so that it does not flicker."""

    drawn_s: float = 0.0
    """Time at which the bar was last redrawn, in seconds of the clock `time.monotonic`."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Format a number; a float is padded with zeros to a fixed width.

        Example:
            >>> Tqdm.format_num(0.5), Tqdm.format_num(3), Tqdm.format_num("abc")
            ('0.500', '3', 'abc')
        """
        text = n if isinstance(n, str) else _tqdm.format_num(n)
        if isinstance(n, int) or "e" in text:
            return text
        if "." not in text and len(text) < _DIGITS:
            try:
                float(text)
            except ValueError:
                return text
            text += "."
        return text.ljust(_DIGITS, "0")


def _bar(name: str, about: str) -> Any:
    """Make a property, with a setter, for the tqdm bar of a stage."""

    def get(self: TQDMProgressBar) -> Tqdm:
        bar = getattr(self, name)
        if bar is None:
            raise TypeError(f"The `{type(self).__name__}.{name}` reference has not been set yet: its stage makes it.")
        return bar

    def put(self: TQDMProgressBar, bar: Tqdm) -> None:
        setattr(self, name, bar)

    return property(get, put, doc=about)


class TQDMProgressBar(ProgressBar):
    """A progress bar drawn by tqdm on stdout.

    Each stage has its own bar: `train_progress_bar`, `val_progress_bar` (also for the sanity check),
    `test_progress_bar` and `predict_progress_bar`. A method `init_..._tqdm`, which may be overridden, makes each bar.
    Every `refresh_rate` batches the training thread sets the bar's counter. Since drawing may take longer than a step,
    the bar and the metrics are drawn at most ten times a second, and also at the last batch and before a validation. If
    a subclass overrides `get_metrics`, the method is called every `refresh_rate` batches.

    Args:
        refresh_rate: batches between two updates; 0 shows nothing. The environment variable TQDM_MINITERS sets a
            minimum.
        process_position: number of lines by which the bars are moved down, to leave room for other bars above them.
        leave: whether the bar of every epoch stays on the terminal.

    Raises:
        MissingPackageError: tqdm is not installed.
        SettingError: an argument is wrong.

    Example:
        >>> class Loud(TQDMProgressBar):
        ...     def init_validation_tqdm(self):
        ...         bar = super().init_validation_tqdm()
        ...         bar.set_description("VALIDATING")
        ...         return bar
        >>> Loud(refresh_rate=10).refresh_rate
        10
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        at_least(0, "0 shows nothing")("refresh_rate", refresh_rate)
        at_least(0)("process_position", process_position)
        if os.environ.get("COLAB_GPU") and refresh_rate == 1:
            refresh_rate = _ON_COLAB
        elif "TQDM_MINITERS" in os.environ:
            refresh_rate = max(int(os.environ["TQDM_MINITERS"]), refresh_rate)
        self._refresh_rate = refresh_rate
        self._process_position = process_position
        self._leave = leave
        self._train_progress_bar: Tqdm | None = None
        self._val_progress_bar: Tqdm | None = None
        self._test_progress_bar: Tqdm | None = None
        self._predict_progress_bar: Tqdm | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: None if isinstance(value, _tqdm) else value for name, value in state.items()}

    # ---- the bars

    train_progress_bar = _bar("_train_progress_bar", "The bar of training, from its start on.")
    val_progress_bar = _bar("_val_progress_bar", "The bar of the sanity check or validation.")
    test_progress_bar = _bar("_test_progress_bar", "The bar of the test.")
    predict_progress_bar = _bar("_predict_progress_bar", "The bar of the prediction.")

    @property
    def refresh_rate(self) -> int:
        """Number of batches between two updates of a bar."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Number of lines by which the bars are moved down."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether the bar shows anything in this process."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether the bar shows nothing in this process."""
        return not self.is_enabled

    def init_sanity_tqdm(self) -> Tqdm:
        """Make the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Tqdm:
        """Make the bar of training."""
        return self._make(self.train_description, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        """Make the bar of a validation; within fit, it is shown below the training bar."""
        alone = self.trainer.state.fn == "validate"
        return self._make(self.validation_description, leave=alone, below=int(not alone))

    def init_test_tqdm(self) -> Tqdm:
        """Make the bar of a test."""
        return self._make(self.test_description)

    def init_predict_tqdm(self) -> Tqdm:
        """Make the bar of a prediction."""
        return self._make(self.predict_description, smoothing=0)

    def _make(self, description: str, leave: bool = True, below: int = 0, **options: Any) -> Tqdm:
        return Tqdm(
            desc=description,
            position=2 * self.process_position + below,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    # ---- updates of the bars

    def _begin(self, bar: Tqdm, total: int | float, description: str) -> None:
        bar.reset()
        bar.total = total if math.isfinite(total) else None  # tqdm does not accept infinity
        bar.initial = 0
        bar.set_description(description)

    def _move(self, bar: Tqdm | None, done: int, *shown: Any) -> None:
        """Set a bar's counter every `refresh_rate` batches, and draw the bar with new metrics if a refresh is due.

        If a subclass overrides `get_metrics`, the method is called each time, as in Lightning.

        Args:
            bar: the bar.
            done: number of batches that are done.
            *shown: the arguments of `get_metrics`; without them, the bar shows no metrics.
        """
        if bar is None or bar.disable or self.is_disabled or (done % self.refresh_rate and done != bar.total):
            return
        bar.n = done
        now_s = time.monotonic()
        draws = done == bar.total or now_s - getattr(bar, "drawn_s", 0.0) >= bar.mininterval
        if shown and (draws or type(self).get_metrics is not ProgressBar.get_metrics):
            bar.set_postfix(_clean_names(self.get_metrics(*shown)), refresh=False)
        if draws:
            bar.drawn_s = now_s
            bar.refresh()

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = Tqdm(disable=True)  # an empty bar until training begins

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.val_progress_bar.close()
        self.train_progress_bar.close()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._move(self._train_progress_bar, batch_idx + 1, trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(_clean_names(self.get_metrics(trainer, module)))
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.train_progress_bar.close()

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            if trainer.state.fn == "fit" and self._train_progress_bar is not None:
                self._train_progress_bar.refresh()
            self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            text = self.sanity_check_description if trainer.sanity_checking else self.validation_description
            total = self.total_val_batches_current_dataloader
            self._begin(self.val_progress_bar, total, f"{text} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._move(self._val_progress_bar, batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if self._train_progress_bar is not None and trainer.state.fn == "fit":
            self._train_progress_bar.set_postfix(_clean_names(self.get_metrics(trainer, module)))

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            self._begin(self.test_progress_bar, total, f"{self.test_description} DataLoader {dataloader_idx}")

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._move(self._test_progress_bar, batch_idx + 1)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            self._begin(self.predict_progress_bar, total, f"{self.predict_description} DataLoader {dataloader_idx}")

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._move(self._predict_progress_bar, batch_idx + 1)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        for bar in self._bars():
            bar.close()
        self.reset_dataloader_idx_tracker()

    def _bars(self) -> list[Tqdm]:
        bars = (self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar)
        return [bar for bar in bars if bar is not None]

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print a line above the bars; if no bar is shown, call Python's `print`."""
        bar = next((bar for bar in self._bars() if not bar.disable), None)
        if bar is None:
            super().print(*args, sep=sep, **kwargs)
        else:
            bar.write(sep.join(map(str, args)), **{name: kwargs[name] for name in ("file", "end") if name in kwargs})


def _clean_names(metrics: dict[str, Any]) -> dict[str, Any]:
    return {clean(str(name), ""): clean(one, "") if isinstance(one, str) else one for name, one in metrics.items()}
