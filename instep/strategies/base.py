"""The base class of all strategies: the only place that knows how a module is spread over processes and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep.distributed import all_reduce_
from instep.distributed.nested import map_leaves
from instep.errors import SettingError, UsageError
from instep.state import PartialState
from instep.strategies.precision import Precision
from instep.utils.optimizer_state import load_optimizer_state, optimizer_state

_SYNC_BATCHNORM_DEVICES = ("cuda", "xpu", "hpu")


class Strategy:
    """How a module is spread, how its steps run, and how its state goes out and in.

    The base class is complete for one device. A strategy of several processes overrides what differs; the Trainer
    never asks which strategy it has. In this order: `check_world_size`, `connect`, `model_context` around the module's
    `configure_model`, `place`, `load_model_state`, the module's `configure_optimizers`, `setup`,
    `load_optimizer_state`, the steps, `teardown`.

    One that cuts the weights up does so in `place`, sets `sharded` and says in `owned` what each rank writes; one whose
    ranks share their data says so in `data_rank`, `data_world_size` and `counts`.

    Example:
        A whole strategy: replicas that average their gradients once per optimizer step, before these are clipped::

            from contextlib import contextmanager

            import torch
            from instep import Strategy
            from instep.distributed import all_reduce_, broadcast
            from instep.strategies import register_strategy

            class AveragedGradients(Strategy):
                name = "averaged_gradients"
                multi_process = True
                _averages = True

                def setup(self, module, optimizers):
                    with torch.no_grad():  # all go on from the first rank's weights
                        for tensor in [*module.parameters(), *module.buffers()]:
                            tensor.copy_(broadcast(tensor))

                def backward(self, loss, *args, **kwargs):
                    super().backward(loss, *args, **kwargs)
                    for parameter in self.module.parameters():
                        if self._averages and parameter.grad is not None:
                            all_reduce_(parameter.grad, "mean")

                @contextmanager
                def no_sync(self):  # around micro-batches but the last one of a window
                    self._averages = False
                    try:
                        yield
                    finally:
                        self._averages = True

            register_strategy("averaged_gradients", AveragedGradients)

        And then `Trainer(strategy="averaged_gradients", devices=2)`.
    """

    name = "single_device"
    multi_process = False
    """Whether it can run with more than one process."""
    sharded = False
    """Whether each rank writes its own part of weights and optimizer states; else the first one writes all of them."""
    inference_mode = True
    """Whether its modules can be evaluated in `torch.inference_mode`; else it is `no_grad`."""
    runs_on_xla = False
    """Whether it ends the graphs that XLA devices record; others are refused there."""

    module: nn.Module
    precision: Precision
    device: torch.device

    loss_weight: Callable[[], float] = staticmethod(lambda: 1.0)
    """What the loop is going to multiply the current batch's loss by, for a strategy that runs backward in the step."""

    # ---- life

    def connect(self, device: torch.device, precision: Precision) -> None:
        """Called once per run, before the module exists on its device."""
        if device.type == "xla" and not self.runs_on_xla:
            raise SettingError(
                f"strategy={self.name!r} does not run on XLA devices. Use 'xla', 'xla_spmd' or 'xla_fsdp'.",
                field="strategy",
                got=self.name,
            )
        self.device = device
        self.precision = precision
        self.step_was_skipped = False
        """Whether `optimizer_step` left its last step out, because a scaled gradient was not finite."""
        self._unscaled: set[int] = set()
        self._finished: set[int] = set()  # those that have stepped since the scaler was updated, or forgot gradients
        self._ones: dict[torch.device, Tensor] = {}

    def model_context(self) -> AbstractContextManager[Any]:
        """A context for the building of large modules, in `configure_model`: on the meta device, for instance."""
        return nullcontext()

    def place(self, module: nn.Module) -> None:
        """Move the module to its device in its dtype, and cut it up where that changes its parameters.

        The optimizers are made after this, and weights of a checkpoint are loaded.
        """
        self.module = module
        self.precision.convert_module(module)
        module.to(self.device)

    def sync_batchnorm(self, module: nn.Module) -> None:
        """Let the module's batch normalisation see the batch of all ranks, in place; called before `place`."""
        sync_batchnorm(module, self.device)

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Spread the placed module; called before the first training step and after weights were loaded.

        Args:
            module: what `place` got.
            optimizers: the optimizers over its parameters; empty for evaluation.
        """

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Spread a placed module for a handwritten loop, which calls what this returns instead of the module.

        Args:
            module: on its device already. A strategy spreads one module; copy it for more.
            optimizers: the optimizers over its parameters.

        Returns:
            What to call; the module itself where nothing has to be added to its forward.
        """
        return module

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The module that `wrap` got."""
        return wrapped

    def take_over(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before `place` step what has become of its parameters, where they changed."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The module's parameters as optimizers have them."""
        return self.module.parameters()

    def leaves(self) -> Iterable[Tensor]:
        """What a backward computes gradients for: the parameters as the step sees them."""
        return self.module.parameters()

    def join(self) -> AbstractContextManager[Any]:
        """A context in which ranks without a batch wait for the others, in a handwritten loop, after `wrap`."""
        if PartialState().num_processes > 1:
            raise UsageError(
                f"ranks that have no batch left cannot wait for the others under strategy={self.name!r}, whose steps "
                "need them all. Give all ranks as many batches."
            )
        return nullcontext()

    @property
    def drifts(self) -> bool:
        """Whether replicas are trained apart, and differ until `unify`."""
        return False

    def unify(self) -> None:
        """Make replicas that were trained apart one: before validation and at the end of training. Collective."""

    def teardown(self) -> None:
        """Give back what `setup` and `wrap` took. May be called twice, and after an error."""

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        """The callable behind `run_step`, resolved once by the loop. With one process it is the bound method itself."""
        return getattr(self.module, name)

    def run_step(self, name: str, *args: Any) -> Any:
        """Run a step method of the module. Calling the method directly would miss what the strategy adds to it.

        Args:
            name: `training_step`, `validation_step`, `test_step`, `predict_step`.
            args: its arguments.
        """
        return self.step_function(name)(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate, scaled where the precision scales gradients.

        Args:
            loss: 0-dim floating tensor.
            args: passed to `Tensor.backward`, as are `kwargs`.
        """
        self.scale(loss).backward(*args, **kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the gradient scaler's factor; the loss itself where the precision does not scale."""
        if self.precision.scaler is None:
            return loss
        self.update_scaler()
        return self.precision.scaler.scale(loss)

    def update_scaler(self) -> None:
        """Adapt the factor to the steps taken since the last time: before the next loss is scaled, and before a save.

        Not after each step: it makes the scaler forget what it knows of the other optimizers' gradients.
        """
        if self._finished and self._unscaled <= self._finished and self.precision.scaler is not None:
            self.precision.scaler.update()
            self._unscaled.clear()
            self._finished.clear()

    def prepare_backward(self, loss: Tensor) -> None:
        """Called before each backward of manual optimization, where the loss does not leave through the step."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """A context for the forward and backward of a micro-batch whose gradients need not be reduced yet."""
        return nullcontext()

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str = "norm") -> None:
        """Clip the gradients of one optimizer in place.

        Args:
            optimizer: whose gradients.
            value: the largest norm (`norm`) or the largest absolute value of an element (`value`).
            algorithm: `norm` or `value`.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "value":
            self.clip_value(parameters, value)
        else:
            self.clip_norm(parameters, value)

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients in place so that their norm over all ranks is at most `max_norm`; the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamp every element of the gradients to [-value, value], in place."""
        nn.utils.clip_grad_value_(parameters, value)

    def multiply_gradients(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply the gradients of one optimizer in place, before they are clipped."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the gradient scaler's factor out, before clipping or looking at gradients; once per step counts."""
        if self.precision.scaler is not None and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self.precision.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def forget_gradients(self, optimizer: Optimizer) -> None:
        """The gradients were set to zero without a step; the next ones are scaled again."""
        if id(optimizer) in self._unscaled:
            self._finished.add(id(optimizer))

    def find_nonfinite(self, tensors: Sequence[Tensor], found: Tensor) -> None:
        """Set `found` to 1 where a value is nan or inf, on this rank or another. Collective; no host waits.

        Args:
            tensors: losses and gradients of this rank, of any dtype and device; where gradients are sharded, all shards
                are looked at because the ranks combine what they found.
            found: 0-dim float32 tensor on the run's device.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_sparse or tensor.is_complex():
                tensor = _values(tensor)
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        with torch.no_grad():
            for (device, _), group in groups.items():
                one = self._ones.get(device)
                if one is None:
                    one = self._ones[device] = torch.ones((), device=device)
                here = found if device == found.device else torch.zeros((), device=device)
                # The gradient scaler's kernel, with a scale of 1: one pass, an eighth of what isfinite costs on a CPU.
                torch._amp_foreach_non_finite_check_and_unscale_(group, here, one)
                if here is not found:
                    torch.maximum(found, here.to(found.device, non_blocking=True), out=found)
        all_reduce_(found, "max")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step one optimizer.

        Args:
            optimizer: the bare optimizer.
            closure: computes the gradients, and the loss that it returns.
            kwargs: passed to the optimizer's `step`.
        """
        scaler = self.precision.scaler
        if scaler is None:
            optimizer.step(closure, **kwargs) if closure is not None else optimizer.step(**kwargs)
            return
        if closure is not None:
            closure()  # the scaler takes no closure
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # a fused one looks at the gradients itself
            found = scaler._found_inf_per_device(optimizer).values()
            self.step_was_skipped = any(bool(value.item()) for value in found)
        else:
            self.step_was_skipped = not stepped
        self._unscaled.add(id(optimizer))
        self._finished.add(id(optimizer))

    # ---- state

    def model_state(self) -> dict[str, Any]:
        """What this rank holds of the module's `state_dict()`: tensors, or what `owned` understands. Collective."""
        return self.module.state_dict()

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        """The shape of every entry of the whole module's `state_dict()`, also of those that other ranks hold.

        Returns:
            Name -> the whole tensor's shape; None for what is no tensor, or has no shape yet.
        """
        return shapes_of(self.module)

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the whole module's state, of which this rank takes its part. Collective.

        Args:
            state: name -> `Tensor` or `StoredTensor`, the whole one; every rank passes the same names. Other values
                are those of `get_extra_state`.
            strict: whether a missing or unexpected name is an error.
        """
        return self.module.load_state_dict({name: whole(value) for name, value in state.items()}, strict=strict)

    def full_model_state(self) -> dict[str, Any]:
        """The whole module's `state_dict()` as plain tensors, on the first rank; empty elsewhere. Collective."""
        return self.model_state() if PartialState().is_main_process else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What this rank holds of an optimizer's state: the tree of `utils/optimizer_state.py`. Collective."""
        return optimizer_state(self.module, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        """Load a whole optimizer's state, of which this rank takes its part. Collective.

        Args:
            optimizer: freshly made.
            tree: its tensors are whole ones, `Tensor` or `StoredTensor`.
            strict: False to load what fits.

        Returns:
            What was left out, for people.
        """
        return load_optimizer_state(self.module, optimizer, map_leaves(whole, tree), strict)

    def owned(self, tree: Any) -> Any:
        """The part of a state that this rank writes. Local.

        Args:
            tree: what `model_state` or `optimizer_state` returned, or a container of such.

        Returns:
            The same with plain tensors and `Shard`s, less the tensors that another rank writes; None to write nothing.
            Over all ranks each element of each tensor is in it once.
        """
        return tree if PartialState().is_main_process else None

    def rank_state(self) -> dict[str, Any]:
        """What a checkpoint keeps for each rank beside all that: what this rank alone knows."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Take up what `rank_state` gave, before the first step; called after everything else was loaded.

        Args:
            state: this rank's, or, in a run on another number of ranks, the first one's.
            own: whether it is this rank's.
        """

    # ---- data parallelism

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads."""
        return PartialState().process_index

    @property
    def data_world_size(self) -> int:
        """Into how many parts the data is cut."""
        return PartialState().num_processes

    @property
    def counts(self) -> bool:
        """Whether this rank's values count in what is summed over ranks: one rank of those that read the same data."""
        return True

    def check_world_size(self, world_size: int) -> None:
        """Raise a `SettingError` when this strategy cannot run with so many processes."""
        if world_size > 1 and not self.multi_process:
            raise SettingError(
                f"strategy={self.name!r} runs in one process, and this run has {world_size}. "
                "Use strategy='ddp' or devices=1. A class of your own says multi_process = True.",
                field="strategy",
                got=self.name,
            )


def whole(value: Any) -> Any:
    """A stored tensor, read; anything else as it is."""
    return value.read() if hasattr(value, "read") and not isinstance(value, Tensor) else value


def shapes_of(module: nn.Module) -> dict[str, torch.Size | None]:
    """The shape of every entry of a module's `state_dict()`; None for what is no tensor, or has no shape yet."""
    return {
        name: it.shape if isinstance(it, Tensor) and not is_lazy(it) else None
        for name, it in module.state_dict().items()
    }


def _values(tensor: Tensor) -> Tensor:
    """The real numbers that a sparse or complex tensor holds, as a view."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def check_sync_batchnorm(device_type: str) -> None:
    """Refuse a kind of device on which torch has no SyncBatchNorm.

    Raises:
        SettingError: it is one.
    """
    if device_type not in _SYNC_BATCHNORM_DEVICES:
        raise SettingError(
            f"sync_batchnorm=True: torch's SyncBatchNorm works on {', '.join(_SYNC_BATCHNORM_DEVICES)}, and this is "
            f"{device_type}. Leave it out (each rank then normalises by its own batch), or use layers that do not look "
            "at the batch, such as GroupNorm or LayerNorm.",
            field="sync_batchnorm",
            got=True,
        )


def sync_batchnorm(module: nn.Module, device: torch.device, group: Any = None) -> None:
    """Make every BatchNorm layer of a module a SyncBatchNorm, in place; nothing with one process.

    Names, parameters and running statistics stay.

    Args:
        module: not a BatchNorm itself.
        device: where it trains.
        group: the process group of the ranks whose batches are parts of one; None for all.

    Raises:
        SettingError: the device has no SyncBatchNorm.
    """
    if PartialState().num_processes > 1:
        check_sync_batchnorm(device.type)
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
