"""`ImageSampler`: log pictures of a few fixed samples during training, to see how the predictions change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.callbacks.base import Callback, logs_here
from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.utils.checks import at_least
from instep.utils.seed import isolate_rng

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

Pictures = Mapping[str, Any]


class ImageSampler(Callback):
    """Log the same few samples in every n-th epoch through `logger.log_image`, with the module's predictions.

    The samples are the first samples of the first validation batch; they are logged at each validation of every n-th
    epoch. With `batch`, they are the samples of `batch`, logged at the end of the training epoch. By default the input
    pictures are the first tensor of the batch with shape (samples, channels, height, width), and the module is called
    with this tensor. If the module returns pictures, they are logged as `samples/prediction` beside `samples/input`. If
    it returns a score for each class, the predicted class and the target class become captions of the input pictures.
    With `sample_fn`, a function of your own makes the pictures, for instance by drawing from a generative model.

    Every rank calls the module, since its layers may be spread over ranks; only the main process logs. The random
    generators are restored afterwards, so training is the same with and without this callback.

    Args:
        num_samples: the largest number of samples to log; they come from the main process's batch.
        every_n_epochs: number of epochs from one logged epoch to the next; the first epoch is always logged.
        sample_fn: function that is called with the module and the samples (the first samples of the batch, on the
            device). It returns a dict from names to pictures, in a form that `logger.log_image` takes: a list of
            pictures or one tensor of several. A pair of pictures and captions is allowed too.
        batch: samples to use in place of those of the validation data.

    Raises:
        SettingError: an argument is wrong. (At the start of training:) there is no validation, and no `batch`.
        HookError: (in the run) the batch has no pictures.

    Example:
        >>> sampler = ImageSampler(num_samples=4, sample_fn=lambda module, batch: {"noise": module.draw(4)})
        >>> sampler.num_samples
        4
    """

    def __init__(
        self,
        num_samples: int = 8,
        every_n_epochs: int = 1,
        sample_fn: Callable[[TrainModule, Any], Pictures] | None = None,
        batch: Any = None,
    ) -> None:
        self.num_samples = at_least(1)("num_samples", num_samples)
        self.every_n_epochs = at_least(1)("every_n_epochs", every_n_epochs)
        self.sample_fn = sample_fn
        self.batch = batch

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.batch is None and not trainer.enable_validation:
            raise SettingError(
                "ImageSampler takes its samples from the validation, and this run has none. Give "
                "ImageSampler(batch=...) some, or a validation loader.",
                field="batch",
            )

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == dataloader_idx == 0 and self.batch is None and self._is_due(trainer):
            self._log(trainer, module, batch)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.batch is not None and self._is_due(trainer):
            modes = {submodule: submodule.training for submodule in module.modules()}
            module.eval()
            try:
                self._log(trainer, module, module.transfer_batch_to_device(self.batch, trainer.strategy.root_device, 0))
            finally:
                for submodule, mode in modes.items():
                    submodule.training = mode

    def _is_due(self, trainer: Trainer) -> bool:
        return (
            trainer.state.fn == "fit"
            and not trainer.sanity_checking
            and not (trainer.position.epoch % self.every_n_epochs)
        )

    def _log(self, trainer: Trainer, module: TrainModule, batch: Any) -> None:
        count = self.num_samples
        samples = map_leaves(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)
        with isolate_rng(), torch.no_grad(), trainer.strategy.precision.context() or nullcontext():
            found = (self.sample_fn or _pictures)(module, samples)
        if not logs_here(trainer):
            return
        for name, pictures in found.items():
            given, captions = pictures if isinstance(pictures, tuple) else (pictures, None)
            options = {} if captions is None else {"caption": list(captions)}
            for logger in trainer.loggers:
                logger.log_image(f"samples/{name}", list(given), step=trainer.global_step, **options)


def _pictures(module: TrainModule, batch: Any) -> Pictures:
    """Return the input pictures of a batch, and the module's predictions as pictures or captions."""
    leaves: list[Tensor] = []
    map_leaves(lambda leaf: leaves.append(leaf) if isinstance(leaf, Tensor) else None, batch)
    images = next((leaf for leaf in leaves if leaf.ndim == 4), None)
    if images is None:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise HookError(
            f"ImageSampler finds no pictures in a batch with tensors of the shapes {shapes}: it looks for (samples, "
            "channels, height, width). Give ImageSampler(sample_fn=lambda module, batch: {name: pictures})."
        )
    predicted = module(images)
    if not isinstance(predicted, Tensor) or predicted.ndim not in (2, 4):
        return {"input": images}
    if predicted.ndim == 4:
        return {"input": images, "prediction": predicted}
    classes = predicted.argmax(dim=1).tolist()
    target = next((leaf for leaf in leaves if leaf.ndim == 1 and not leaf.is_floating_point()), None)
    truth = [None] * len(classes) if target is None else target.tolist()
    captions = [
        f"predicted {one}" if true is None else f"predicted {one}, target {true}"
        for one, true in zip(classes, truth, strict=True)
    ]
    return {"input": (images, captions)}
