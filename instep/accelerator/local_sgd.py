"""Local SGD: every rank trains on its own for some steps, then all ranks average their weights."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from instep.distributed import gather_object
from instep.errors import DistributedError, SettingError
from instep.state import GradientState
from instep.strategies.local_sgd import average_weights
from instep.utils.checks import at_least

if TYPE_CHECKING:
    from instep.accelerator.accelerator import Accelerator


class LocalSGD:
    """Context in which each rank trains on its own, and weights are averaged every `local_sgd_steps` optimizer steps.

    Gradients are not reduced inside the context. Trainable parameters and floating-point buffers (running statistics)
    are averaged, also at the end of the block. Optimizer states and integer buffers are not averaged. After an error
    nothing is averaged. With one process, or with `enabled=False`, nothing happens.

    All ranks must take the same number of steps, which is checked at every average.

    Args:
        accelerator: the `Accelerator`.
        model: the model that `accelerator.prepare` returned.
        local_sgd_steps: optimizer steps between two averages.
        enabled: whether to average; False leaves the training as it is.

    Raises:
        SettingError: `local_sgd_steps` is below 1, or ranks hold only parts of the weights.
        DistributedError: (at an average) ranks took different numbers of steps.

    Example:
        >>> import torch
        >>> from instep.accelerator import Accelerator
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in loader:
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(model(batch).square().mean())
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()  # counts once a window of accumulated gradients is complete
        >>> accelerator.end_training()

    Source:
        Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019 (https://arxiv.org/abs/1805.09767).
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self.enabled = enabled and accelerator.num_processes > 1
        self.local_sgd_steps = at_least(1)("local_sgd_steps", local_sgd_steps)
        self.steps = 0
        """Number of optimizer steps since the `with` block began."""
        self._accelerator = accelerator
        self._model = model
        self._stack = ExitStack()
        if self.enabled:
            self._check_replicated()

    def __enter__(self) -> LocalSGD:
        self.steps = 0
        if self.enabled:
            self._stack.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.enabled and error is None:
            self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the weights if this is due.

        Inside an accumulation window, do nothing.
        """
        if not self.enabled or not GradientState().sync_gradients:
            return
        self.steps += 1
        if self.steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Average the weights, after a check that all ranks are at the same step. Collective."""
        steps = gather_object(self.steps)
        if len(set(steps)) > 1:
            raise DistributedError(
                f"LocalSGD: ranks took different numbers of optimizer steps when they met: {steps} by rank. Give all "
                "ranks the same number of batches, and call step() on all of them."
            )
        module = self._accelerator.unwrap_model(self._model)
        average_weights((*(p for p in module.parameters() if p.requires_grad), *module.buffers()))

    def _check_replicated(self) -> None:
        module = self._accelerator.unwrap_model(self._model)
        for name, parameter in module.named_parameters():
            # DTensors have a device_mesh; parameters that DeepSpeed has sharded have a ds_id.
            if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
                raise SettingError(
                    f"LocalSGD needs the whole model on every rank, and {name} is sharded over ranks. Use strategy="
                    "'ddp', or leave LocalSGD out.",
                    field="model",
                )
