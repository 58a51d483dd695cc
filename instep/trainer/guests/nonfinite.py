"""Guard against a loss or gradient that is nan or inf: `Trainer(nonfinite="stop" | "skip" | "continue")`.

In each optimizer step, the losses of its accumulation window and its gradients are checked once: after the gradients
were reduced and unscaled, and before they are clipped. The ranks agree on the result on the device. There are two ways
to act on the result:

- The host acts immediately if it can read the result without waiting (on a CPU) or must read it (optimizers without
  `found_inf`).
- Otherwise the optimizer's own kernel leaves the update out if its flag `found_inf` is set. The flag stays on the
  device. With "stop" it stays set, so that nothing is updated any more. The host reads all flags later: when logged
  values are handed to the loggers, and before a validation, a save and an epoch's end.

With precision "16-mixed" the gradient scaler checks the gradients, and this guard checks only the losses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.data.base import list_samples
from instep.distributed import gather_object
from instep.errors import NonFiniteError
from instep.strategies.gradients import parameters_of
from instep.trainer.guests import StepGuest, StepParts
from instep.trainer.log import StepMetrics
from instep.utils.optimizer_state import names_of
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.trainer.context import RunContext

_READ_AFTER = 1024  # largest number of steps whose flags stay unread on the device
_LOSSES = 256  # largest number of single losses that are kept until the next optimizer step
_NAMES = 3  # largest number of parameter names in a message


@dataclass
class _Check:
    """Result of the check of one optimizer step: kept on the device until the host reads it."""

    step: int
    epoch: int
    batches: range
    losses: list[Tensor]
    parameters: list[Tensor]
    found: Tensor
    norms: Tensor | None = None  # one norm per parameter, not finite if the parameter's gradient is not finite
    bad: bool | None = None  # whether a value is not finite; None: the host has not read the result yet
    what: str = "gradients"


@dataclass
class _Facts:
    """Facts that one rank reports of a step with a loss or gradient that is not finite."""

    loss: float | None
    parameters: list[str]
    samples: dict[int, list[Any] | None]


class _LeftOut(Exception):
    """Exception that a closure raises to leave `optimizer.step` before it changes anything."""


class NonFiniteGuard(StepGuest):
    """Feature (guest) that checks the optimizer steps of a fit for nan and inf, and acts as `Trainer(nonfinite=)` says.

    Args:
        ctx: context of a fit that has optimizers and whose setting `nonfinite` is "stop", "skip" or "continue".
    """

    in_trials = False

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        trainer, optimizers, device, policy = ctx.trainer, ctx.optimizers, ctx.device, ctx.settings.nonfinite
        self._trainer, self._module, self._optimizers = trainer, ctx.module, optimizers
        self._position, self._progress, self._device = trainer.position, trainer.progress, device
        self._strategy, self._scaler = trainer.strategy, trainer.strategy.precision.scaler
        self._leaves_out = policy != "continue"
        self._stops = policy == "stop"
        self._host_decides = {
            id(optimizer): host_may_wait(device) or (self._leaves_out and not self._takes_flag(optimizer))
            for optimizer in optimizers
        }
        self._known: dict[int, int] = {}  # id of an optimizer -> number of its gradients when it last stepped
        self._losses: list[Tensor] = []
        self._first_batch = 0
        # id of an optimizer -> check of this step, the same for all optimizers that step together
        self._checked: dict[int, _Check] = {}
        self._waiting: list[_Check] = []
        self._last_found = torch.zeros((), dtype=torch.float32, device=device)
        self._last_step = -1
        slow = [type(o).__name__ for o in optimizers if self._leaves_out and not self._takes_flag(o)]
        if slow and not host_may_wait(device) and trainer.is_global_zero:
            warn_user(
                f"nonfinite={policy!r} makes the host wait for the device once per step of {', '.join(slow)}, which "
                "cannot leave an update out by itself. Adam, AdamW, SGD and Adagrad with fused=True can"
            )

    def _takes_flag(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's kernel leaves the update out if the optimizer's attribute `found_inf` is 1."""
        return (
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and self._scaler is None
            # an optimizer with torch's older interface gets the scaler as an argument of `step`, and has no `found_inf`
            and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        )

    # ---- the check of a step

    def take(self, parts: StepParts) -> None:
        """Make the step keep each loss, and check the gradients before they are clipped."""
        self._losses = []  # drop the losses of an accumulation window that the last epoch left unfinished
        parts.on_loss.append(self.keep_loss)
        parts.before_clip.append(self.check_step)
        parts.needs_loss = True
        parts.around.append("nonfinite= looks at the loss before the backward")

    def step_optimizer(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Store the function `step`, and return `optimizer_step`, which calls `step` unless the policy forbids it."""
        self._step = step
        return self.optimizer_step

    def keep_loss(self, loss: Tensor) -> None:
        """Keep a loss for the check of this accumulation window; called before each backward."""
        if not self._losses:
            self._first_batch = self._progress.batch_idx
        # in manual optimization the module may never step, so add losses up before they fill the memory
        elif len(self._losses) == _LOSSES:
            self._losses = [torch.stack(self._losses).sum()]
        self._losses.append(loss.detach().clone())

    def check_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Check the gradients of a window when they are complete, before they are clipped.

        For an optimizer that is not checked here, `optimizer_step` checks the gradients itself.

        Args:
            optimizers: optimizers that step together. If the gradients of one are not finite, none of them steps.
        """
        self._checked = dict.fromkeys(map(id, optimizers), self._check(*optimizers))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step the optimizer, unless a value is not finite and the policy leaves the step out."""
        if closure is not None:
            self._step_with_closure(optimizer, closure, kwargs)
            return
        check = self._check_of(optimizer)
        if check.bad:
            self._report(check)
            if self._leaves_out:
                self._leave_out(optimizer)
                return
        try:
            if check.bad is None:
                self._pass_on(optimizer, check)
            self._step(optimizer, **kwargs)
        finally:
            _forget_flag(optimizer)
        self._known[id(optimizer)] = len(_with_gradients(optimizer))

    def _check_of(self, optimizer: Optimizer) -> _Check:
        checked = self._checked.pop(id(optimizer), None)
        return self._check(optimizer) if checked is None else checked

    def _check(self, *optimizers: Optimizer) -> _Check:
        losses = self._losses
        parameters = [p for optimizer in optimizers for p in _with_gradients(optimizer)]
        gradients = [] if self._scaler is not None else [p.grad for p in parameters if p.grad is not None]
        found = self._last_found.clone() if self._stops else torch.zeros((), dtype=torch.float32, device=self._device)
        self._strategy.gradients.find_nonfinite([*losses, *gradients], found)
        last = self._progress.batch_idx
        batches = range(self._first_batch if losses and self._first_batch <= last else last, last + 1)
        check = _Check(self._position.global_step + 1, self._position.epoch, batches, losses, parameters, found)
        self._last_found, self._losses = found, []
        # If `found_inf` skips the first step of torch's fused SGD, its momentum is not initialized. So the host
        # decides on a first step, and on a step in which the number of gradients has changed.
        new = self._leaves_out and any(self._known.get(id(o)) != len(_with_gradients(o)) for o in optimizers)
        if new or any(self._host_decides[id(optimizer)] for optimizer in optimizers):
            check.bad = bool(found.item())
        if check.bad is not False:
            check.norms = _norms(gradients, self._device)
        return check

    def _report(self, check: _Check) -> None:
        self._waiting.append(check)
        self.settle()

    def _leave_out(self, optimizer: Optimizer) -> None:
        self._strategy.gradients.forget(optimizer)
        # Unlike a step that the scaler skips, a step that this guard leaves out is counted, also by schedulers.
        self._strategy.gradients.step_was_skipped = False
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it, to warn of a wrong order

    def _pass_on(self, optimizer: Optimizer, check: _Check) -> None:
        """Let the optimizer's kernel decide whether to update; the host reports a bad step when it reads the flags."""
        if len(self._waiting) >= _READ_AFTER:
            self.settle()
        self._waiting.append(check)
        if self._leaves_out:
            optimizer.grad_scale, optimizer.found_inf = None, check.found  # type: ignore[attr-defined]

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], kwargs: dict[str, Any]) -> None:
        """Step an optimizer with a closure, and check what the closure computes.

        torch's own optimizers except L-BFGS run the closure once, before they change anything. L-BFGS and optimizers
        from outside torch may run it several times. Then only the first evaluation is checked, since a line search may
        try weights where the loss is infinite; if the policy leaves bad steps out, the weights after the step are
        checked too.
        """
        several = type(optimizer).__name__ == "LBFGS" or not type(optimizer).__module__.startswith("torch.optim.")
        weights = parameters_of(optimizer)
        before = [p.detach().clone() for p in weights] if several and self._leaves_out else []
        check: _Check | None = None

        def checked() -> Any:
            nonlocal check
            loss = closure()
            current = self._check_of(optimizer)
            if check is not None:
                return loss
            check = current
            if check.bad is None:
                self._pass_on(optimizer, check)
            elif check.bad and self._leaves_out:
                raise _LeftOut
            elif check.bad:
                self._report(check)
            return loss

        left_out = False
        try:
            self._step(optimizer, checked, **kwargs)
        except _LeftOut:
            left_out = True
        finally:
            _forget_flag(optimizer)
        if check is None:
            return  # the optimizer did not run the closure
        if before and not left_out:
            check.found = torch.zeros((), dtype=torch.float32, device=self._device)
            self._strategy.gradients.find_nonfinite([p.detach() for p in weights], check.found)
            if check.found.item():
                left_out, check.what = True, "weights after the step"
                check.parameters, check.norms = weights, _norms([p.detach() for p in weights], self._device)
                optimizer.state.clear()  # drop the optimizer's state, which led to the bad step
        if not left_out:
            self._known[id(optimizer)] = len(_with_gradients(optimizer))
            return
        with torch.no_grad():
            # if `before` is empty, the optimizer has not changed anything, so there is nothing to restore
            for p, value in zip(weights, before, strict=False):
                p.copy_(value)
        self._report(check)
        self._leave_out(optimizer)

    # ---- the report of bad steps

    def settle(self) -> None:
        """Read the flags that are still on the device, and report bad steps. Collective.

        There is nothing to do if the host has read the result of each step immediately.

        Raises:
            NonFiniteError: the policy is "stop", and a step since the last call was not finite.
        """
        checks, self._waiting = self._waiting, []
        if not checks:
            return
        at = self._position
        flags = torch.stack([check.found for check in checks]).tolist()
        bad = [check for check, flag in zip(checks, flags, strict=True) if flag]
        reported: list[tuple[int, _Check]] = []
        for check in bad[:1] if self._stops else bad:
            if check.step == self._last_step:
                continue  # the step is already reported, for another optimizer
            self._last_step = check.step
            at.nonfinite_steps += 1
            metrics = {"nonfinite_steps": float(at.nonfinite_steps)}
            self._trainer.metrics.log_steps([StepMetrics(metrics, max(check.step, at.global_step), {})])
            if at.nonfinite_steps <= 5 or not at.nonfinite_steps & (at.nonfinite_steps - 1):
                reported.append((at.nonfinite_steps, check))
        if not reported:
            return
        everyone = gather_object(tuple(self._facts(check) for _, check in reported))
        for index, (count, check) in enumerate(reported):
            facts: list[_Facts] = [ranks[index] for ranks in everyone]
            if self._stops:
                raise self._error(check, facts)
            if self._trainer.is_global_zero:
                done = "The update was left out" if self._leaves_out else "The update was made all the same"
                more = "; from the sixth on, powers of two are reported" if count == 5 else ""
                warn_user(f"{_describe(check, facts, self._trainer._run.source)} {done} (number {count}{more}).")

    def _error(self, check: _Check, facts: list[_Facts]) -> NonFiniteError:
        callback = self._trainer.checkpoint_callback
        checkpoint = "" if callback is None else callback.last_model_path
        replay = f"`instep replay {checkpoint or '<checkpoint>'}` repeats the steps after a checkpoint"
        return NonFiniteError(
            f"{_describe(check, facts, self._trainer._run.source)} The update was left out, as was every one after it, "
            f"and the run ends (nonfinite='stop'); no checkpoint was made since. To find the cause: {replay}, and "
            "Trainer(detect_anomaly=True) names the operation; a lower learning rate or gradient_clip_val may help. To "
            "go on without such steps: nonfinite='skip'.",
            global_step=check.step,
            epoch=check.epoch,
            batches=check.batches,
            ranks=[rank for rank, own in enumerate(facts) if own.loss is not None]
            or [rank for rank, own in enumerate(facts) if own.parameters],
            parameters=list(dict.fromkeys(name for own in facts for name in own.parameters)),
            sample_indices=[own.samples for own in facts],
        )

    def _facts(self, check: _Check) -> _Facts:
        losses = [float(loss) for loss in check.losses]
        names: list[str] = []
        if check.norms is not None:
            known = names_of(self._module, self._optimizers)
            values = check.norms.tolist()
            names = [known[p] for p, norm in zip(check.parameters, values, strict=True) if not math.isfinite(norm)]
        source = self._trainer._run.source
        at = source.plan.share_of
        replayed = {batch for batch in check.batches if (source.share if at is None else at(batch)).mine == 0}
        samples = {batch: [] if batch in replayed else source.sample_indices(batch) for batch in check.batches}
        return _Facts(next((loss for loss in losses if not math.isfinite(loss)), None), names, samples)


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def host_may_wait(device: torch.device) -> bool:
    """Return True if the host may read each result at once: reading from this device does not delay anything."""
    return device.type == "cpu"


def _norms(tensors: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Compute the norm of each tensor. It is not finite if a value is not finite, or if the norm itself overflows."""
    if not tensors:
        return None
    # Take only this rank's shard of a sharded tensor, since the reports of all ranks are gathered later.
    tensors = [getattr(t, "_local_tensor", t) for t in tensors]
    # on a GPU, this computes all norms in one kernel
    norms = torch._foreach_norm([t._values() if t.is_sparse else t for t in tensors])
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [(norm * 0).to(device, torch.float32) for norm in norms]
    return torch.stack(tuple(norms))


def _forget_flag(optimizer: Optimizer) -> None:
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def _describe(check: _Check, facts: list[_Facts], source: Any) -> str:
    losses = [(rank, own.loss) for rank, own in enumerate(facts) if own.loss is not None]
    names = list(dict.fromkeys(name for own in facts for name in own.parameters))
    wrong: list[str] = []
    if losses:
        on = f" on rank {', '.join(str(rank) for rank, _ in losses)}" if len(facts) > 1 else ""
        wrong.append(f"the loss is {losses[0][1]}{on}")
    if names:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        wrong.append(f"{check.what} that are not finite: {', '.join(names[:_NAMES])}{more}")
    batches = f"batch_idx {check.batches[0]}" + (f" to {check.batches[-1]}" if len(check.batches) > 1 else "")
    samples = [
        (f"rank {rank}: " if len(facts) > 1 else "")
        + "; ".join(list_samples(each, source) for each in own.samples.values())
        for rank, own in enumerate(facts)
    ]
    what = "; ".join(wrong) or "a value was not finite"
    return f"global_step {check.step} (epoch {check.epoch}, {batches}): {what}. Samples: {', '.join(samples)}."
