"""`Strategy`, the base class of all strategies and itself the strategy for one device; and helpers for strategies."""

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
    """Distribute a module over processes and devices, run its steps, and save and load its state.

    The base class is the complete strategy for one device. A strategy for several processes overrides the methods that
    differ; the Trainer never tests which strategy it has. The methods are called in this order: `check_world_size`,
    `connect`, `model_context` around the module's `configure_model`, `prepare_module`, `load_model_state`, the module's
    `configure_optimizers`, `prepare_training`, `load_optimizer_state`, the steps, `teardown`.

    A strategy that shards weights does so in `prepare_module`, sets `sharded`, and returns from `local_shards` what
    each rank writes into a checkpoint. A strategy with several ranks that read the same data sets `data_rank`,
    `data_world_size` and `contributes` in `connect`. The attribute `gradients`, an object of `gradients_class`, handles
    gradients between a backward and the optimizer's step.

    Example:
        A complete strategy, whose replicas average their gradients once per optimizer step, before clipping::

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
    """Whether the strategy can run with more than one process."""
    sharded = False
    """Whether each rank saves its part of weights and optimizer states; if False, the first rank saves all of them."""
    inference_mode = True
    """Whether modules can be evaluated in `torch.inference_mode`; if False, `torch.no_grad` is used."""
    runs_on_xla = False
    """Whether the strategy ends the graph that an XLA device records, so that it is run. If False, XLA is refused."""
    steps_can_be_undone = True
    """Whether a step is undone completely if weights, buffers, gradients and the optimizers' states are put back."""
    replicas_diverge = False
    """Whether each replica is trained by itself, so that the weights of replicas differ until `average_replicas`."""
    wraps_with_optimizer = False
    """Whether `wrap` needs the optimizer. If so, a strategy object serves only one model and its optimizer."""
    takes_new_groups = True
    """Whether parameter groups may be added to the optimizers while the module is trained."""
    whole_parameters = True
    """Whether each rank has the complete parameters, so that layers may be exchanged or reparametrized."""
    runs_copies = False
    """Whether threads run copies of the module, in which a submodule's replaced `forward` does not work."""
    gradients_class: type[Gradients] = Gradients
    """Class of `gradients`, which scales and clips gradients and steps optimizers."""

    module: nn.Module
    _exchanged: Mapping[Tensor, Any] = MappingProxyType({})
    """Parameter on the meta device -> the parameter with values by which `prepare_module` has replaced it."""
    precision: Precision
    device: torch.device
    gradients: Gradients

    data_rank: int
    """Index of the part of the data that this rank reads. `connect` sets it, `data_world_size` and `contributes`."""
    data_world_size: int
    """Number of parts into which the data is divided."""
    contributes: bool = True
    """Whether this rank's values enter sums over ranks. Of ranks that read the same data, only one contributes."""

    loss_weight: Callable[[], float] = staticmethod(lambda: 1.0)
    """Returns the weight of a batch's loss in its accumulation window, for strategies whose step runs the backward."""
    before_prepare: tuple[Callable[[nn.Module], object], ...] = ()
    """Functions that the Trainer calls with the module, after `configure_model` and before `prepare_module`.

    A callback adds a function in `setup`, and removes it in `teardown`.
    """

    @property
    def num_processes(self) -> int:
        """Number of processes of the run on this machine."""
        state = PartialState()
        return state.num_processes // state.num_nodes

    def _refused(self, why: str) -> SettingError:
        """Return the error for a run that this strategy does not support.

        Args:
            why: end of the error's sentence, which begins with the name of the strategy.
        """
        return SettingError(f"strategy={self.name!r} {why}", field="strategy", got=self.name)

    _constructed: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is like a new strategy, without the devices, modules and process groups of a run.
        return self.__dict__ if self._constructed is None else self._constructed

    @property
    def root_device(self) -> torch.device:
        """Device of this rank; Lightning's name for `device`."""
        return self.device

    # ---- set-up and tear-down

    def check_world_size(self, world_size: int) -> None:
        """Raise a `SettingError` if this strategy cannot run with this number of processes."""
        if world_size > 1 and not self.multi_process:
            raise self._refused(
                f"runs in one process, and this run has {world_size}. Use strategy='ddp' or devices=1. A class of your "
                "own says multi_process = True."
            )

    @property
    def backward_fits_in_graph(self) -> bool:
        """Whether a compiled step may contain the backward, because the strategy adds nothing to a backward."""
        return type(self) is Strategy

    def connect(self, device: torch.device, precision: Precision) -> None:
        """Set the run's device and precision. Called once per run, before the module is on its device."""
        if device.type == "xla" and not self.runs_on_xla:
            raise self._refused("does not run on XLA devices. Use 'xla', 'xla_spmd' or 'xla_fsdp'.")
        if self._constructed is None:
            # Copy only containers, which a run may change; a user's process group or lock cannot be copied.
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
        """Seed the generators so that ranks with different data draw different random numbers (such as dropout masks).

        Ranks with `data_rank` 0 keep the user's random generators as they are.

        Args:
            seed: seed of the run, the same on all ranks.
        """
        if self.data_rank:
            own = derive_seed(seed, "rank", self.data_rank)
            if torch.initial_seed() != own:
                seed_process(own)

    def model_context(self) -> AbstractContextManager[Any]:
        """Return the context for `configure_model`, for instance one that builds the module on the meta device."""
        return nullcontext()

    def prepare_module(self, module: nn.Module) -> None:
        """Move the module to its device and dtype; a strategy that replaces parameters by shards does it here.

        After this call, the optimizers are made and the weights of a checkpoint are loaded.
        """
        # Imported late: not needed to import the Trainer.
        from instep.strategies.materialize import materialize_module

        self.module = module
        self.precision.convert_module(module)
        self._exchanged = materialize_module(module, self.device)
        module.to(self.device)

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Distribute the prepared module over the processes; called before the first step, with loaded weights.

        Args:
            module: module that was passed to `prepare_module`.
            optimizers: optimizers of its parameters; empty for evaluation.
        """
        from instep.strategies.materialize import check_offloaded

        check_offloaded(module, optimizers)

    def changing_trainable(self) -> AbstractContextManager[Any]:
        """Return a context in which hooks may freeze and unfreeze parameters, and add groups to the optimizers.

        The Trainer uses this context between steps, around `on_fit_start` and `on_train_epoch_start`. At the end of the
        context, the strategy rebuilds everything that depends on which parameters require gradients. Collective.
        """
        return nullcontext()

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Distribute a prepared module for a handwritten training loop, which then calls the returned module.

        Args:
            module: module that is already on its device. A strategy distributes only one module; copy the strategy for
                further modules.
            optimizers: optimizers of its parameters.

        Returns:
            The module to call; it is `module` itself if the strategy adds nothing to the forward.
        """
        return module

    def wrap_evaluated(self, module: nn.Module) -> nn.Module:
        """Prepare a module for a handwritten loop that only evaluates it, and return the module to call."""
        self.prepare_training(module, ())
        return module

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the original module of a module that `wrap` returned."""
        return wrapped

    def rebind_optimizer(self, optimizer: Optimizer) -> None:
        """Replace parameters in an optimizer by the new ones, if `prepare_module` has replaced them in the module."""
        for group in optimizer.param_groups:
            group["params"] = [self._exchanged.get(parameter, parameter) for parameter in group["params"]]

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the module's parameters as the same objects that optimizers have."""
        return self.module.parameters()

    def join(self) -> AbstractContextManager[Any]:
        """Return a context for a handwritten loop in which ranks may have different numbers of batches."""
        if PartialState().num_processes > 1:
            raise UsageError(
                f"ranks that have no batch left cannot wait for the others under strategy={self.name!r}, whose steps "
                "need them all. Give all ranks as many batches."
            )
        return nullcontext()

    def average_replicas(self) -> None:
        """Copy rank 0's buffers to all ranks, and average weights that differ between ranks (local SGD). Collective.

        This is called before validation and at the end of training. Otherwise validation metrics would depend on the
        BatchNorm buffers of each rank, but a checkpoint holds only the buffers of rank 0.
        """
        if PartialState().num_processes > 1:
            state = self.module.state_dict(keep_vars=True)
            with torch.no_grad():
                for name, _ in self.module.named_buffers():
                    buffer = state.get(name)
                    if type(buffer) is Tensor:  # skip DTensors, which are sharded over ranks
                        buffer.copy_(broadcast(buffer))

    def teardown(self) -> None:
        """Release the resources that `prepare_training` and `wrap` took. May be called twice, and after an error."""

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        """Return the function that the loop calls to run a step method of the module.

        With one process it is the bound method itself. Otherwise it adds the strategy's work, such as DDP's reduction
        of gradients, which a direct call of the method would skip. Called once, before the loop.

        Args:
            name: `training_step`, `validation_step`, `test_step` or `predict_step`.
        """
        return getattr(self.module, name)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate the loss, scaled if the precision scales gradients.

        Args:
            loss: 0-dim floating-point tensor.
            args: further arguments of `Tensor.backward`, together with `kwargs`.
        """
        self.gradients.scale(loss).backward(*args, **kwargs)

    def prepare_backward(self, loss: Tensor) -> None:
        """Called in manual optimization before each backward.

        Args:
            loss: loss of this backward. The step may return another value, or none.
        """

    def abandon_step(self) -> None:
        """Clean up after a step that an error on some rank has interrupted; the gradients of that step are lost.

        Before the next step, `prepare_training` must be called again.
        """

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch whose gradients need not be reduced yet."""
        return nullcontext()

    # ---- state

    def model_state(self) -> dict[str, Any]:
        """Return this rank's part of the module's `state_dict()`, in the form that `local_shards` takes. Collective."""
        return self.module.state_dict()

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        """Return the shapes of all entries of the whole module's `state_dict()`, including entries on other ranks.

        Returns:
            The shape of the whole tensor by name; None for a value that is not a tensor, and for a tensor without a
            shape yet (lazy modules).
        """
        return shapes_of(self.module)

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the whole module's state; each rank loads its part. Collective: all ranks call it.

        Args:
            state: whole tensors by name, each a `Tensor` or `StoredTensor`, and values from `get_extra_state`. Every
                rank passes the same names.
            strict: whether a missing or unexpected name is an error.
        """
        return self.module.load_state_dict({name: whole(value) for name, value in state.items()}, strict=strict)

    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter and buffer in the module's `state_dict()`, for reading and writing.

        If values are written into a part in place, all ranks must call `sync_local_weights` afterwards. Local.
        """
        state = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def sync_local_weights(self) -> None:
        """Make the module use the values that were written into the tensors of `local_weights`. Collective."""

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what `model_state` would return if the weights had other values. Collective: all ranks call it.

        Args:
            held: the other values, with the names of `local_weights` as keys.
        """
        return {**self.model_state(), **held}

    def local_part(self, name: str, value: Any) -> Tensor:
        """Return the part of a whole tensor that corresponds to this rank's part in `local_weights`. Local.

        Args:
            name: name of the tensor in `local_weights`.
            value: the whole tensor, as `Tensor` or `StoredTensor`.
        """
        return whole(value)

    def full_model_state(self) -> dict[str, Any]:
        """Return the whole module's `state_dict()` with plain tensors on rank 0, and {} on other ranks. Collective."""
        state = self.model_state()
        return state if PartialState().is_main_process else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state, in the form of `utils/optimizer_state.py`. Collective."""
        return optimizer_state(self.module, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        """Load a whole optimizer's state; each rank loads its part. Collective: all ranks call it.

        Args:
            optimizer: a new optimizer.
            tree: state in the form of `utils/optimizer_state.py`, with whole tensors (`Tensor` or `StoredTensor`).
            strict: whether the whole state must fit; False: load what fits.

        Returns:
            Messages about what was not loaded.
        """
        return load_optimizer_state(self.module, optimizer, map_leaves(whole, tree), strict)

    def holds_all(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return True if this rank has the whole state of module and optimizers, and can save it alone. Local."""
        return False

    def local_shards(self, tree: Any) -> Any:
        """Return the shards of a state that this rank writes. Local.

        Args:
            tree: result of `model_state` or `optimizer_state`, or a container of such results.

        Returns:
            The state with plain tensors and `Shard` objects, without tensors that another rank writes; None if this
            rank writes nothing. All ranks together return each element of each tensor exactly once.
        """
        return tree if PartialState().is_main_process else None

    def rank_state(self) -> dict[str, Any]:
        """Return state that differs between ranks, so that a checkpoint stores it for each rank."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any], own: bool) -> None:
        """Load a result of `rank_state`; called before the first step, after all other state was loaded.

        Args:
            state: state of this rank, or of rank 0 if a different number of ranks saved the checkpoint.
            own: whether `state` is the state of this rank.
        """


def check_cuttable(module: nn.Module, strategy: Strategy) -> None:
    """Raise an error for a quantized module under a strategy that shards weights.

    Raises:
        SettingError: the module has quantized weights, and the strategy shards.
    """
    if strategy.whole_parameters:
        return
    # Imported late: only needed by strategies that shard weights.
    from instep.strategies.quantized_state import quantized_tensors

    if quantized_tensors(module):
        raise SettingError(
            f"strategy={strategy.name!r} cuts weights up, and the quantized weights of {type(module).__name__} cannot "
            "be cut: each has scales of its own. Use strategy='ddp', where each rank has the whole model.",
            field="strategy",
            got=strategy.name,
        )


def shapes_of(module: nn.Module) -> dict[str, torch.Size | None]:
    """Return the shape of every entry of a module's `state_dict()`; None for an entry without a shape."""
    return {
        name: value.shape if isinstance(value, Tensor) and not is_lazy(value) else None
        for name, value in module.state_dict().items()
    }


def check_sync_batchnorm(device_type: str) -> None:
    """Raise an error if torch has no SyncBatchNorm for a type of device, such as "cpu".

    Raises:
        SettingError: torch has no SyncBatchNorm for this type.
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
    """Convert every BatchNorm layer of a module to SyncBatchNorm, in place; do nothing with one process.

    Names, parameters and running statistics stay the same.

    Args:
        module: module that is not a BatchNorm itself.
        device: device that the module is trained on.
        group: process group of the ranks that compute the statistics together. None: all ranks.

    Raises:
        SettingError: torch has no SyncBatchNorm for the device.
    """
    if PartialState().num_processes > 1:
        check_sync_batchnorm(device.type)
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
