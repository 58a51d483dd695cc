"""The base class of all strategies: the only place that knows how a module is spread over processes and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep.distributed import broadcast
from instep.distributed.nested import map_leaves
from instep.errors import SettingError, UsageError
from instep.state import PartialState
from instep.strategies.gradients import Gradients
from instep.strategies.precision import Precision
from instep.utils.optimizer_state import load_optimizer_state, optimizer_state, whole
from instep.utils.seed import derive_seed, seed_process

_SYNC_BATCHNORM_DEVICES = ("cuda", "xpu", "hpu")


class Strategy:
    """Strategy that spreads a module over processes and devices, runs its steps, and saves and loads its state.

    The base class is complete for one device. A strategy of several processes overrides what differs; the Trainer
    never asks which strategy it has. In this order: `check_world_size`, `connect`, `model_context` around the module's
    `configure_model`, `prepare_module`, `load_model_state`, the module's `configure_optimizers`, `prepare_training`,
    `load_optimizer_state`, the steps, `teardown`.

    One that cuts the weights up does so in `prepare_module`, sets `sharded` and says in `local_shards` what each rank
    writes; one whose ranks share their data sets `data_rank`, `data_world_size` and `contributes` in `connect`. What
    happens to gradients between a backward and the optimizer's step is done by `gradients`, of class `gradients_class`.

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

                def prepare_training(self, module, optimizers):
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
    steps_can_be_undone = True
    """Whether a step leaves nothing behind once weights, buffers, gradients and the optimizers' states are put back."""
    replicas_diverge = False
    """Whether replicas are trained apart, and differ until `average_replicas`."""
    wraps_with_optimizer = False
    """Whether `wrap` needs the optimizer, and `gradients` hold what that one model's optimizer steps."""
    takes_new_groups = True
    """Whether parameter groups may be added to the optimizers while the module is trained."""
    whole_parameters = True
    """Whether each rank has the module's parameters whole, so that layers may be exchanged or reparametrized."""
    runs_copies = False
    """Whether its threads run copies of the module, which know nothing of what was done to a part's forward."""
    gradients_class: type[Gradients] = Gradients
    """Class of `gradients`, which scales and clips gradients and steps optimizers."""

    module: nn.Module
    _exchanged: Mapping[Tensor, Any] = MappingProxyType({})
    """What `prepare_module` made of parameters on the meta device that nobody has values for."""
    precision: Precision
    device: torch.device
    gradients: Gradients

    data_rank: int
    """Which part of the data this rank reads; `connect` sets it, and the two below."""
    data_world_size: int
    """The number of parts that the data is cut into."""
    contributes: bool = True
    """Whether this rank's values are part of sums over ranks: one rank's of those that read the same data."""

    loss_weight: Callable[[], float] = staticmethod(lambda: 1.0)
    """Weight of the current batch's loss in its window, for a strategy that runs the backward within the step."""
    before_prepare: tuple[Callable[[nn.Module], object], ...] = ()
    """What the Trainer calls with the module before `prepare_module` gets it, when `configure_model` has run.

    A callback adds a function in `setup`, and takes it out in `teardown`.
    """

    @property
    def num_processes(self) -> int:
        """Number of the run's processes on this machine."""
        state = PartialState()
        return state.num_processes // state.num_nodes

    def _refused(self, why: str) -> SettingError:
        """Make the error for a run that this strategy does not support; `why` continues the sentence after its name."""
        return SettingError(f"strategy={self.name!r} {why}", field="strategy", got=self.name)

    _constructed: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is one that no run has used: it must not drag devices, modules and process groups along.
        return self.__dict__ if self._constructed is None else self._constructed

    @property
    def root_device(self) -> torch.device:
        """This rank's device; `device` by Lightning's name."""
        return self.device

    # ---- life

    def check_world_size(self, world_size: int) -> None:
        """Raise a `SettingError` when this strategy cannot run with so many processes."""
        if world_size > 1 and not self.multi_process:
            raise self._refused(
                f"runs in one process, and this run has {world_size}. Use strategy='ddp' or devices=1. A class of your "
                "own says multi_process = True."
            )

    @property
    def backward_fits_in_graph(self) -> bool:
        """Whether a backward needs nothing from the strategy, so that a compiled step may contain it."""
        return type(self) is Strategy

    def connect(self, device: torch.device, precision: Precision) -> None:
        """Take the run's device and precision; called once per run, before the module exists on its device."""
        if device.type == "xla" and not self.runs_on_xla:
            raise self._refused("does not run on XLA devices. Use 'xla', 'xla_spmd' or 'xla_fsdp'.")
        if self._constructed is None:
            # Only what a run may fill: a process group or a lock of a user's strategy cannot be copied.
            self._constructed = {
                name: copy(value) if isinstance(value, dict | list | set) else value
                for name, value in self.__dict__.items()
            }
        self.device = device
        self.precision = precision
        self.gradients = self.gradients_class(self)
        process = PartialState()
        self.data_rank, self.data_world_size = process.process_index, process.num_processes

    def separate_random_streams(self, seed: int) -> None:
        """Make ranks with other data draw other random numbers (dropout masks); the first rank keeps the user's stream.

        Args:
            seed: the run's, alike on all ranks.
        """
        if self.data_rank:
            own = derive_seed(seed, "rank", self.data_rank)
            if torch.initial_seed() != own:
                seed_process(own)

    def model_context(self) -> AbstractContextManager[Any]:
        """Return a context in which large modules are built, in `configure_model`: on the meta device, for instance."""
        return nullcontext()

    def prepare_module(self, module: nn.Module) -> None:
        """Move the module to its device and dtype, and divide it here if that changes its parameters.

        The optimizers are made after this, and weights of a checkpoint are loaded.
        """
        from instep.strategies.materialize import materialize_module  # late: importing the Trainer need not load it

        self.module = module
        self.precision.convert_module(module)
        self._exchanged = materialize_module(module, self.device)
        module.to(self.device)

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Spread the placed module; called before the first training step and after weights were loaded.

        Args:
            module: what `prepare_module` got.
            optimizers: the optimizers over its parameters; empty for evaluation.
        """
        from instep.strategies.materialize import check_offloaded

        check_offloaded(module, optimizers)

    def changing_trainable(self) -> AbstractContextManager[Any]:
        """Return a context in which hooks may freeze and unfreeze parameters, and add groups to the optimizers.

        The Trainer enters it between steps: around `on_fit_start` and `on_train_epoch_start`. What a strategy has built
        on the parameters that require gradients, it builds anew at the end of the context. Collective.
        """
        return nullcontext()

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Spread a placed module for a handwritten loop, which calls what this returns instead of the module.

        Args:
            module: on its device already. A strategy spreads one module; copy it for more.
            optimizers: the optimizers over its parameters.

        Returns:
            What to call; the module itself where nothing has to be added to its forward.
        """
        return module

    def wrap_evaluated(self, module: nn.Module) -> nn.Module:
        """Make a placed module ready for a handwritten loop that does not train it, and return what to call."""
        self.prepare_training(module, ())
        return module

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the module that `wrap` got."""
        return wrapped

    def rebind_optimizer(self, optimizer: Optimizer) -> None:
        """Put the parameters that `prepare_module` made into an optimizer that was made before."""
        for group in optimizer.param_groups:
            group["params"] = [self._exchanged.get(parameter, parameter) for parameter in group["params"]]

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the module's parameters as optimizers have them."""
        return self.module.parameters()

    def join(self) -> AbstractContextManager[Any]:
        """Return a context in which ranks without a batch wait for the others, in a handwritten loop, after `wrap`."""
        if PartialState().num_processes > 1:
            raise UsageError(
                f"ranks that have no batch left cannot wait for the others under strategy={self.name!r}, whose steps "
                "need them all. Give all ranks as many batches."
            )
        return nullcontext()

    def average_replicas(self) -> None:
        """Give all ranks the first one's buffers, and replicas that were trained apart their mean. Collective.

        Called before validation and when training ends. Without it the metrics of a validation would depend on what
        each rank's BatchNorm layers saw since the last resume, of which a checkpoint has the first rank's.
        """
        if PartialState().num_processes > 1:
            state = self.module.state_dict(keep_vars=True)
            with torch.no_grad():
                for name, _ in self.module.named_buffers():
                    buffer = state.get(name)
                    if type(buffer) is Tensor:  # the buffer is no part of one that is spread over ranks
                        buffer.copy_(broadcast(buffer))

    def teardown(self) -> None:
        """Release what `prepare_training` and `wrap` have allocated. May be called twice, and after an error."""

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the callable that runs a step method, found once by the loop; in one process the bound method itself.

        Calling the method directly would miss what the strategy adds to it.

        Args:
            name: `training_step`, `validation_step`, `test_step` or `predict_step`.
        """
        return getattr(self.module, name)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate, scaled where the precision scales gradients.

        Args:
            loss: 0-dim floating tensor.
            args: passed to `Tensor.backward`, as are `kwargs`.
        """
        self.gradients.scale(loss).backward(*args, **kwargs)

    def prepare_backward(self, loss: Tensor) -> None:
        """Prepare a backward of manual optimization, whose loss is not returned by the step."""

    def abandon_step(self) -> None:
        """Abandon a step that an error, on this rank or another, has left in the middle; its gradients are lost.

        `prepare_training` must follow before the next step.
        """

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch whose gradients need not be reduced yet."""
        return nullcontext()

    # ---- state

    def model_state(self) -> dict[str, Any]:
        """Return this rank's part of the module's `state_dict()`: tensors, or what `local_shards` knows. Collective."""
        return self.module.state_dict()

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        """Return the shape of every entry of the whole module's `state_dict()`, also of those that other ranks hold.

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

    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter and buffer of the module's `state_dict()`, to be read or written.

        What is written into one in place changes the module, once all ranks have called `sync_local_weights`. Local.
        """
        state = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def sync_local_weights(self) -> None:
        """Make the next forward use the values written into `local_weights`. Collective."""

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what `model_state` would if `local_weights` had other values. Collective.

        Args:
            held: the other values, by the names of `local_weights`.
        """
        return {**self.model_state(), **held}

    def local_part(self, name: str, value: Any) -> Tensor:
        """Return the part of a whole tensor that this rank would have in `local_weights`. Local.

        Args:
            name: its name there.
            value: `Tensor` or `StoredTensor`.
        """
        return whole(value)

    def full_model_state(self) -> dict[str, Any]:
        """Return the whole module's `state_dict()` as plain tensors, on the first rank; empty elsewhere. Collective."""
        return self.model_state() if PartialState().is_main_process else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state: the tree of `utils/optimizer_state.py`. Collective."""
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

    def holds_all(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether this rank holds the whole state and can return it without other ranks. Local."""
        return False

    def local_shards(self, tree: Any) -> Any:
        """Return the shards of a state that this rank writes. Local.

        Args:
            tree: what `model_state` or `optimizer_state` returned, or a container of such.

        Returns:
            The same state with plain tensors and `Shard` objects, without the tensors that another rank writes; None to
            write nothing. Over all ranks, each element of each tensor is there once.
        """
        return tree if PartialState().is_main_process else None

    def rank_state(self) -> dict[str, Any]:
        """Return state of this rank that others lack, which a checkpoint keeps for each rank."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Load the state of `rank_state` before the first step, after everything else was loaded.

        Args:
            state: this rank's, or, in a run on another number of ranks, the first one's.
            own: whether it is this rank's.
        """


def check_cuttable(module: nn.Module, strategy: Strategy) -> None:
    """Refuse a quantized module under a strategy that divides weights.

    Raises:
        SettingError: as above.
    """
    if strategy.whole_parameters:
        return
    from instep.strategies.quantized_state import quantized_tensors  # late: most strategies leave weights whole

    if quantized_tensors(module):
        raise SettingError(
            f"strategy={strategy.name!r} cuts weights up, and the quantized weights of {type(module).__name__} cannot "
            "be cut: each has scales of its own. Use strategy='ddp', where each rank has the whole model.",
            field="strategy",
            got=strategy.name,
        )


def shapes_of(module: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shape of every entry of a module's `state_dict()`; None for an entry without one."""
    return {
        name: value.shape if isinstance(value, Tensor) and not is_lazy(value) else None
        for name, value in module.state_dict().items()
    }


def check_sync_batchnorm(device_type: str) -> None:
    """Refuse a kind of device on which torch has no SyncBatchNorm.

    Raises:
        SettingError: it is one.
    """
    if device_type not in _SYNC_BATCHNORM_DEVICES:
        raise SettingError(
            f"sync_batchnorm=True: torch's SyncBatchNorm works on {', '.join(_SYNC_BATCHNORM_DEVICES)}, and this is "
            f"{device_type}. Leave it out (each rank then normalizes by its own batch), or use layers that do not look "
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
