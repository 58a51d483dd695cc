"""What happens when the loss or a gradient is nan or inf: `Trainer(nonfinite="stop" | "skip" | "continue")`.

Each optimizer step looks once at the losses of its window and at its gradients, after they were reduced and unscaled
and before they are clipped; what was found is agreed over ranks on the device. Who acts on it:

- the host, at once, where it may look without waiting (on a CPU) or has to (optimizers without `found_inf`);
- else the optimizer's own kernel, which leaves the update out by `found_inf`. The flag stays on the device, and with
  "stop" it stays set, so that nothing is updated any more. The host reads all flags when it reads anyway: when logged
  values are handed over, before a validation, a save and an epoch's end.

With the gradient scaler of "16-mixed" the scaler looks at the gradients, and only the loss is looked at here.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed import gather_object
from instep.errors import NonFiniteError
from instep.trainer.log import StepMetrics
from instep.utils.optimizer_state import names_of

if TYPE_CHECKING:
    from instep.trainer.session import Session

_READ_AFTER = 1024  # steps whose flags may wait on the device
_LOSSES = 256  # losses that are kept apart until the next optimizer step
_NAMES, _INDICES = 3, 16  # how many of them a message lists


@dataclass
class _Look:
    """What one look found: kept on the device until the host reads it."""

    step: int
    epoch: int
    batches: range
    losses: list[Tensor]
    parameters: list[nn.Parameter]
    found: Tensor
    norms: Tensor | None = None  # one per parameter, not finite where its gradient is not
    bad: bool | None = None  # None: the host does not know yet
    what: str = "gradients"


@dataclass
class _Facts:
    """What one rank knows of a bad step."""

    loss: float | None
    parameters: list[str]
    samples: dict[int, list[Any] | None]


class _LeftOut(Exception):
    """Raised in a closure to leave `optimizer.step` before it changes anything."""


class NonFiniteGuard:
    """Looks at every optimizer step of a fit, and acts by the policy.

    Args:
        run: the fit; its optimizers are made.
        policy: "stop", "skip" or "continue".
    """

    def __init__(self, run: Session, policy: str) -> None:
        self._run, self._strategy = run, run.strategy
        self._leaves_out = policy != "continue"
        self._stops = policy == "stop"
        self._host_decides = {
            id(optimizer): host_may_wait(run.device) or (self._leaves_out and not self._takes_flag(optimizer))
            for optimizer in run.optimizers
        }
        self._known: dict[int, int] = {}  # optimizer -> how many gradients it had when it last stepped
        self._losses: list[Tensor] = []
        self._first_batch = 0
        self._looked: tuple[Optimizer, _Look] | None = None
        self._waiting: list[_Look] = []
        self._last_found = torch.zeros((), device=run.device)
        self._last_step = -1
        slow = [type(o).__name__ for o in run.optimizers if self._leaves_out and not self._takes_flag(o)]
        if slow and not host_may_wait(run.device) and run.rank == 0:
            warnings.warn(
                f"nonfinite={policy!r} makes the host wait for the device once per step of {', '.join(slow)}, which "
                "cannot leave an update out by itself. Adam, AdamW, SGD and Adagrad with fused=True can",
                stacklevel=4,
            )

    def _takes_flag(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's kernel leaves the update out where its attribute `found_inf` is 1."""
        return (
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and self._run.precision.scaler is None
            and "grad_scaler" not in inspect.signature(optimizer.step).parameters  # torch's old way
        )

    # ---- the step

    def note_loss(self, loss: Tensor) -> None:
        """Before each backward."""
        if not self._losses:
            self._first_batch = self._run.batch_idx
        elif len(self._losses) == _LOSSES:  # a manual step that never comes must not fill the memory
            self._losses = [torch.stack(self._losses).sum()]
        self._losses.append(loss.detach().clone())

    def forget_losses(self) -> None:
        """A window was left unfinished."""
        self._losses = []

    def look(self, optimizer: Optimizer) -> None:
        """The gradients are complete; call before they are clipped. `optimizer_step` looks itself otherwise."""
        self._looked = (optimizer, self._look(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """What `Gradients.step` does, unless something is not finite and the policy leaves it out."""
        if closure is not None:
            self._step_with_closure(optimizer, closure, kwargs)
            return
        look = self._take(optimizer)
        if look.bad:
            self._report(look)
            if self._leaves_out:
                self._leave_out(optimizer)
                return
        try:
            if look.bad is None:
                self._pass_on(optimizer, look)
            self._strategy.gradients.step(optimizer, **kwargs)
        finally:
            _forget_flag(optimizer)
        self._known[id(optimizer)] = len(look.parameters)

    def _take(self, optimizer: Optimizer) -> _Look:
        looked, self._looked = self._looked, None
        return looked[1] if looked is not None and looked[0] is optimizer else self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> _Look:
        run, losses = self._run, self._losses
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [] if run.precision.scaler is not None else [p.grad for p in parameters]
        found = self._last_found.clone() if self._stops else torch.zeros((), device=run.device)
        self._strategy.gradients.find_nonfinite([*losses, *gradients], found)
        last = run.batch_idx
        batches = range(self._first_batch if losses and self._first_batch <= last else last, last + 1)
        look = _Look(run.position.global_step + 1, run.position.epoch, batches, losses, parameters, found)
        self._last_found, self._losses = found, []
        # torch's fused SGD leaves its momentum uninitialised when the first step is one that is left out.
        new = self._leaves_out and self._known.get(id(optimizer)) != len(parameters)
        if self._host_decides[id(optimizer)] or new:
            look.bad = bool(found.item())
        if look.bad is not False:
            look.norms = _norms(gradients, run.device)
        return look

    def _report(self, look: _Look) -> None:
        self._waiting.append(look)
        self.settle()

    def _leave_out(self, optimizer: Optimizer) -> None:
        self._strategy.gradients.forget(optimizer)
        self._strategy.gradients.step_was_skipped = False  # the scaler's word; here the step counts, for schedulers too
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it, to warn of a wrong order

    def _pass_on(self, optimizer: Optimizer, look: _Look) -> None:
        """Leave the decision to the optimizer's kernel, and the report to the next time the host reads."""
        if len(self._waiting) >= _READ_AFTER:
            self.settle()
        self._waiting.append(look)
        if self._leaves_out:
            optimizer.grad_scale, optimizer.found_inf = None, look.found  # type: ignore[attr-defined]

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], kwargs: dict[str, Any]) -> None:
        """The optimizer runs the closure: torch's own at once and before they change anything, but for L-BFGS.

        Of several evaluations the first is looked at: a line search may well try weights where the loss is infinite.
        The weights that it ends with are looked at instead.
        """
        several = type(optimizer).__name__ == "LBFGS" or not type(optimizer).__module__.startswith("torch.optim.")
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in weights] if several and self._leaves_out else []
        look: _Look | None = None

        def looked() -> Any:
            nonlocal look
            loss = closure()
            current = self._take(optimizer)
            if look is not None:
                return loss
            look = current
            if look.bad is None:
                self._pass_on(optimizer, look)
            elif look.bad and self._leaves_out:
                raise _LeftOut
            elif look.bad:
                self._report(look)
            return loss

        left_out = False
        try:
            self._strategy.gradients.step(optimizer, looked, **kwargs)
        except _LeftOut:
            left_out = True
        finally:
            _forget_flag(optimizer)
        if look is None:
            return  # it did not run the closure
        if before and not left_out:
            look.found = torch.zeros((), device=self._run.device)
            self._strategy.gradients.find_nonfinite([p.detach() for p in weights], look.found)
            if look.found.item():
                left_out, look.what = True, "weights after the step"
                look.parameters, look.norms = weights, _norms([p.detach() for p in weights], self._run.device)
                optimizer.state.clear()  # what it remembers led there
        if not left_out:
            self._known[id(optimizer)] = len(look.parameters)
            return
        with torch.no_grad():
            for p, value in zip(weights, before, strict=False):  # nothing was changed where there is no copy
                p.copy_(value)
        self._report(look)
        self._leave_out(optimizer)

    # ---- the report

    def settle(self) -> None:
        """Read what is still on the device, and report. Collective; nothing to do where the host decides.

        Raises:
            NonFiniteError: the policy is "stop", and a step since the last time was not finite.
        """
        looks, self._waiting = self._waiting, []
        if not looks:
            return
        at = self._run.position
        flags = torch.stack([look.found for look in looks]).tolist()
        bad = [look for look, flag in zip(looks, flags, strict=True) if flag]
        reported: list[tuple[int, _Look]] = []
        for look in bad[:1] if self._stops else bad:
            if look.step == self._last_step:
                continue  # another optimizer of this step
            self._last_step = look.step
            at.nonfinite_steps += 1
            metrics = {"nonfinite_steps": float(at.nonfinite_steps)}
            self._run.trainer.metrics.log_steps([StepMetrics(metrics, max(look.step, at.global_step), {})])
            if at.nonfinite_steps <= 5 or not at.nonfinite_steps & (at.nonfinite_steps - 1):
                reported.append((at.nonfinite_steps, look))
        if not reported:
            return
        everyone = gather_object([self._facts(look) for _, look in reported])
        for index, (count, look) in enumerate(reported):
            facts: list[_Facts] = [ranks[index] for ranks in everyone]
            if self._stops:
                raise self._error(look, facts)
            if self._run.rank == 0:
                done = "The update was left out" if self._leaves_out else "The update was made all the same"
                more = "; from the sixth on, powers of two are reported" if count == 5 else ""
                warnings.warn(f"{_describe(look, facts)} {done} (number {count}{more}).", stacklevel=2)

    def _error(self, look: _Look, facts: list[_Facts]) -> NonFiniteError:
        trainer = self._run.trainer
        callback = trainer.checkpoint_callback
        checkpoint = "" if callback is None else callback.last_model_path
        replay = f"`instep replay {checkpoint or '<checkpoint>'}` repeats the steps after a checkpoint"
        return NonFiniteError(
            f"{_describe(look, facts)} The update was left out, as was every one after it, and the run ends "
            f"(nonfinite='stop'); no checkpoint was made since. To find the cause: {replay}, and "
            "Trainer(detect_anomaly=True) names the operation; a lower learning rate or gradient_clip_val may help. To "
            "go on without such steps: nonfinite='skip'.",
            global_step=look.step,
            epoch=look.epoch,
            batches=look.batches,
            ranks=[rank for rank, own in enumerate(facts) if own.loss is not None]
            or [rank for rank, own in enumerate(facts) if own.parameters],
            parameters=list(dict.fromkeys(name for own in facts for name in own.parameters)),
            sample_indices=[own.samples for own in facts],
        )

    def _facts(self, look: _Look) -> _Facts:
        losses = [float(loss) for loss in look.losses]
        names: list[str] = []
        if look.norms is not None:
            known = names_of(self._run.module, self._run.optimizers)
            values = look.norms.tolist()
            names = [known[p] for p, norm in zip(look.parameters, values, strict=True) if not math.isfinite(norm)]
        source = self._run.loaders.train
        at = source.plan.at
        replayed = {batch for batch in look.batches if (source.share if at is None else at(batch)).mine == 0}
        samples = {batch: [] if batch in replayed else source.sample_indices(batch) for batch in look.batches}
        return _Facts(next((loss for loss in losses if not math.isfinite(loss)), None), names, samples)


def host_may_wait(device: torch.device) -> bool:
    """Whether reading a value off this device costs nothing."""
    return device.type == "cpu"


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """One number per tensor, not finite where the tensor is not (or is near overflow)."""
    if not tensors:
        return None
    tensors = [getattr(t, "_local_tensor", t) for t in tensors]  # of a sharded one this rank's part; all are asked
    norms = torch._foreach_norm([t._values() if t.is_sparse else t for t in tensors])  # one kernel on a GPU
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [(norm * 0).to(device, torch.float32) for norm in norms]
    return torch.stack(tuple(norms))


def _forget_flag(optimizer: Optimizer) -> None:
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def _describe(look: _Look, facts: list[_Facts]) -> str:
    losses = [(rank, own.loss) for rank, own in enumerate(facts) if own.loss is not None]
    names = list(dict.fromkeys(name for own in facts for name in own.parameters))
    wrong: list[str] = []
    if losses:
        on = f" on rank {', '.join(str(rank) for rank, _ in losses)}" if len(facts) > 1 else ""
        wrong.append(f"the loss is {losses[0][1]}{on}")
    if names:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        wrong.append(f"{look.what} that are not finite: {', '.join(names[:_NAMES])}{more}")
    batches = f"batch_idx {look.batches[0]}" + (f" to {look.batches[-1]}" if len(look.batches) > 1 else "")
    samples = [
        (f"rank {rank}: " if len(facts) > 1 else "") + "; ".join(_listed(indices) for indices in own.samples.values())
        for rank, own in enumerate(facts)
    ]
    what = "; ".join(wrong) or "a value was not finite"
    return f"global_step {look.step} (epoch {look.epoch + 1}, {batches}): {what}. Samples: {', '.join(samples)}."


def _listed(indices: list[Any] | None) -> str:
    if indices is None:
        return "unknown"
    more = f" and {len(indices) - _INDICES} more" if len(indices) > _INDICES else ""
    return f"{indices[:_INDICES]}{more}"


@contextmanager
def no_gradients_from(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A backward in which every parameter gets a gradient of zeros, whatever the loss.

    For a batch that is replayed with weight 0: its loss may be nan, and nan times 0 is nan.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
