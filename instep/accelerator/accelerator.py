"""`Accelerator`: the Trainer's strategies, precision, data, loggers and checkpoints for a handwritten loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep import distributed
from instep.accelerator import saving
from instep.accelerator.compiling import TorchDynamoPlugin, compile_asked_for
from instep.accelerator.exporting import save
from instep.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    by_kind,
    profile,
)
from instep.accelerator.loader import AcceleratedLoader, cut_last, gather_rows, gather_samples, skip_first_batches
from instep.accelerator.memory import clear_device_cache
from instep.accelerator.parallelism import ParallelismConfig
from instep.accelerator.preparing import (
    PreparedRun,
    accumulation_asked_for,
    choose_strategy,
    make_precision,
    precision_asked_for,
)
from instep.accelerator.saving import HookHandle, States
from instep.accelerator.trackers import LogWith, Trackers
from instep.accelerator.wrappers import AcceleratedOptimizer, AcceleratedScheduler
from instep.checkpoint.resume import Resume, ResumeReport
from instep.checkpoint.weights import save_weights
from instep.compile import CompileConfig
from instep.data import DataLoaderConfiguration
from instep.data.plan import Share
from instep.distributed import Triggers
from instep.distributed.nested import map_leaves
from instep.errors import OTHERS_WAIT, SettingError, UsageError
from instep.state import AcceleratorState, GradientState, PartialState, read_environment
from instep.state.device import DistributedType
from instep.state.partial import ProcessMethods
from instep.state.process import is_held
from instep.strategies import Strategy
from instep.types import Location, PathLike, ReadOnly
from instep.utils.checks import at_least, check_object, parse_size
from instep.utils.paths import local_path, to_path
from instep.utils.porting import instead_of
from instep.utils.warn import warn_user


class Accelerator(ProcessMethods):
    """Runs a loop that you write yourself on any number of processes and devices.

    It starts no processes: run the script by itself, under torchrun, or through `debug_launcher` and
    `notebook_launcher`. `prepare` takes models, optimizers, loaders and schedulers in any order and returns what the
    loop uses in their place. Every sample of an epoch counts exactly once, in `backward` and in `gather_for_metrics`.
    The gradient of an accumulation window is the mean over the window's samples, also in a shorter last window.

    An Accelerator is an active run (see `AcceleratorState`) until `end_training()` or `free_memory()`.

    Args:
        device_placement: whether models and batches are moved to the device.
        split_batches: if given, replaces `split_batches` of `dataloader_config`.
        mixed_precision: "no", "fp16" (not on a CPU), "bf16" or "fp8" (emulated on a CPU); None: the value of the
            environment variable INSTEP_PRECISION, else "no".
        gradient_accumulation_steps: micro-batches of one window, used by `accumulate` and `backward`; None: the value
            of the environment variable INSTEP_ACCUMULATE_GRAD_BATCHES, else 1.
        cpu: True uses the CPU even if there is an accelerator; None: as the environment variable INSTEP_ACCELERATOR
            says.
        dataloader_config: how loaders are prepared.
        strategy: a name or a `Strategy`, as for the Trainer; each model gets a copy. None: the values of the
            environment variables INSTEP_STRATEGY and INSTEP_STRATEGY_OPTIONS, else "auto".
        parallelism_config: sizes of the process mesh, in place of `strategy`.
        compile: "module": compile each model in `prepare`; an `instep.compile.CompileConfig`, or a dict of its fields,
            can also compile only the repeated blocks, or compile with other options.
        dynamo_backend: name of a backend of torch.compile, with which `prepare` compiles each model.
        dynamo_plugin: like `dynamo_backend`, with more options.
        log_with: loggers: "tensorboard", "wandb", "csv", "all", a `Logger` or `GeneralTracker`, or a list
            of these.
        project_dir: folder of checkpoints and logs, unless `project_config` sets it.
        project_config: like `project_dir`, with more options.
        gradient_accumulation_plugin: like `gradient_accumulation_steps`, with more options.
        step_scheduler_with_optimizer: whether a scheduler steps only with its optimizer. With False, every call of
            `scheduler.step()` steps the scheduler.
        kwargs_handlers: `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs`, `ProfileKwargs`; at most one of each.
        debug: whether ranks compare each collective before they run it; None: the value of the environment variable
            INSTEP_DEBUG.

    Raises:
        SettingError: an argument is wrong, or two of them contradict each other.
        StateError: the process state already exists with other values.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(torch.randn(10, 4), batch_size=4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     loss = model(batch).square().mean()
        ...     accelerator.backward(loss)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> accelerator.step
        3
        >>> accelerator.end_training()

    Source:
        Names and meaning are those of Hugging Face Accelerate's Accelerator.
    """

    _prepared_type: type[PreparedRun] = PreparedRun

    def __init__(
        self,
        *,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        strategy: str | Strategy | None = None,
        parallelism_config: ParallelismConfig | None = None,
        # this argument is named as in torch, although the name hides the builtin `compile`
        compile: str | bool | CompileConfig | dict[str, Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        log_with: LogWith = None,
        project_dir: PathLike | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] = (),
        debug: bool | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            takes = sorted(set(inspect.signature(Accelerator).parameters) - {"unknown"})
            near = [f"did you mean {close}? " for close in get_close_matches(name, takes, n=1)]
            hint = instead_of("Accelerator", name) or f"{''.join(near)}known are {', '.join(takes)}"
            raise SettingError(f"Accelerator({name}=...) is not taken: {hint}.", field=name, got=unknown[name])
        for name, kind, value in (
            ("parallelism_config", ParallelismConfig, parallelism_config),
            ("project_config", ProjectConfiguration, project_config),
            ("dataloader_config", DataLoaderConfiguration, dataloader_config),
            ("gradient_accumulation_plugin", GradientAccumulationPlugin, gradient_accumulation_plugin),
            ("dynamo_plugin", TorchDynamoPlugin, dynamo_plugin),
        ):
            if value is not None:
                check_object(name, value, kind)
        mixed_precision = precision_asked_for(mixed_precision)
        accumulation = accumulation_asked_for(gradient_accumulation_plugin, gradient_accumulation_steps)
        if parallelism_config is not None:
            if strategy is not None:
                raise SettingError("give strategy or parallelism_config, not both", field="strategy", got=strategy)
            strategy = parallelism_config.strategy()
        self.parallelism_config = parallelism_config
        self._handlers = by_kind(kwargs_handlers)
        self._accumulation = accumulation
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config = replace(self.dataloader_config, split_batches=split_batches)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        if read_environment().launcher != "none":
            # imported late: used only in processes that a launcher started
            from instep.health.error_report import report_failures

            report_failures()
        group = self._handlers.get(InitProcessGroupKwargs)
        process = self._process = PartialState(cpu=cpu, debug=debug, **({} if group is None else group.options()))
        # Keep device, rank and world size, since the process state is gone after end_training().
        self._device, self._distributed_type = process.device, process.distributed_type
        self._rank, self._local_rank = process.process_index, process.local_process_index
        self._world_size = process.num_processes
        self.precision = make_precision(mixed_precision, process.device, self._handlers)
        self._trackers = Trackers(log_with, process.is_main_process, self.logging_dir)
        self.triggers = Triggers(reserved=())
        """Named triggers; `triggers.tick(step)` returns those that the ranks agree on, without waiting for a rank."""
        self._prepared = self._prepared_type(  # this call makes the Accelerator the active run
            process,
            self.precision,
            choose_strategy(strategy, process, self._handlers.get(DistributedDataParallelKwargs)),
            accumulation,
            self.dataloader_config,
            device_placement,
            step_scheduler_with_optimizer,
            compile_asked_for(compile, dynamo_plugin, dynamo_backend),
        )
        self._uses = self._prepared.uses
        self._states = States(self._prepared, self.project_configuration, self._trackers)
        self.resume_report: ResumeReport | None = None

    # ---- properties of this process

    state: ReadOnly[AcceleratorState] = ReadOnly(lambda a: AcceleratorState(), "State of the process and of this run.")
    gradient_state: ReadOnly[GradientState] = ReadOnly(lambda a: GradientState(), "State of gradients and loaders.")
    device: ReadOnly[torch.device] = ReadOnly(lambda a: a._device, "Device of this process.")
    distributed_type: ReadOnly[DistributedType] = ReadOnly(lambda a: a._distributed_type, "Kind of the processes.")

    @property
    def num_processes(self) -> int:
        """Number of processes, the world size."""
        return self._world_size

    @property
    def process_index(self) -> int:
        """Rank of this process, from 0."""
        return self._rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process among the processes on its node, from 0."""
        return self._local_rank

    # ---- settings and state of the run

    @property
    def project_dir(self) -> str | None:
        """Folder of checkpoints; None if it is not set."""
        folder = self.project_configuration.project_dir
        return None if folder is None else os.path.expanduser(folder)

    @property
    def logging_dir(self) -> str | None:
        """Folder of loggers; None if it is not set."""
        folder = self.project_configuration.logging_dir
        return self.project_dir if folder is None else os.path.expanduser(folder)

    mixed_precision: ReadOnly[str] = ReadOnly(lambda a: a.precision.mixed_precision, "'no', 'fp16', 'bf16' or 'fp8'.")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per accumulation window. A new number is used from the next window on."""
        return self._prepared.run.gradient.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._prepared.set_accumulation(at_least(1)("gradient_accumulation_steps", num_steps))

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window: gradients are reduced and optimizers step."""
        return self._prepared.syncs

    @sync_gradients.setter
    def sync_gradients(self, syncs: bool) -> None:
        self._prepared.run.gradient.sync_gradients = syncs

    optimizer_step_was_skipped: ReadOnly[bool] = ReadOnly(
        lambda a: any(optimizer.step_was_skipped for optimizer in a._prepared.optimizers),
        "Whether an optimizer left out its last step because a gradient was not finite.",
    )
    step: ReadOnly[int] = ReadOnly(lambda a: a._prepared.step, "Number of optimizer steps, skipped ones too.")
    seed: ReadOnly[int] = ReadOnly(lambda a: a._prepared.seed, "Seed of the data's order, from rank 0.")
    run_id: ReadOnly[str] = ReadOnly(lambda a: a._states.line.run_id, "Name of the run; `load_state` restores it.")
    optimizers: ReadOnly[list[AcceleratedOptimizer]] = ReadOnly(lambda a: a._prepared.optimizers)
    """Optimizers that `prepare` has returned."""
    schedulers: ReadOnly[list[AcceleratedScheduler]] = ReadOnly(lambda a: a._prepared.schedulers)
    """Learning-rate schedulers that `prepare` has returned."""
    dataloaders: ReadOnly[list[AcceleratedLoader]] = ReadOnly(lambda a: a._prepared.dataloaders)
    """Loaders that `prepare` has returned."""
    trackers: ReadOnly[list[Any]] = ReadOnly(lambda a: a._trackers.started, "Trackers that `init_trackers` started.")
    save_iteration: ReadOnly[int] = ReadOnly(
        lambda a: a.project_configuration.iteration, "Number of the next automatic state."
    )
    scaler: ReadOnly[Any] = ReadOnly(lambda a: a.precision.scaler, "The gradient scaler of fp16; None without one.")
    use_distributed: ReadOnly[bool] = ReadOnly(lambda a: a.num_processes > 1, "Whether there are several processes.")
    multi_device = use_distributed

    # Values of `dataloader_config`, under the attribute names that Accelerate has.
    split_batches: ReadOnly[bool] = ReadOnly(lambda a: a.dataloader_config.split_batches)
    """Setting of this name in `dataloader_config`."""
    dispatch_batches: ReadOnly[bool | None] = ReadOnly(lambda a: a.dataloader_config.dispatch_batches)
    """Setting of this name in `dataloader_config`."""
    even_batches: ReadOnly[bool] = ReadOnly(lambda a: a.dataloader_config.even_batches)
    """Setting of this name in `dataloader_config`."""
    non_blocking: ReadOnly[bool] = ReadOnly(lambda a: a.dataloader_config.non_blocking)
    """Setting of this name in `dataloader_config`."""

    # ---- preparing

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None, **named: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the loop, in any order. Collective.

        Args:
            objects: models, optimizers, loaders and schedulers. Objects of other kinds are returned unchanged.
            device_placement: for each of `objects`, whether it is moved to the device; None for the Accelerator's
                setting.
            named: models and loaders with a name, by which a checkpoint finds them again. Two models of one class need
                names. Optimizers and schedulers are found by the parameters that they step.

        Returns:
            The prepared objects in the given order, as a tuple; a single object is returned by itself.

        Raises:
            SettingError: two models have the same name, `device_placement` does not have one value per object, or an
                object is a class.

        Example:
            >>> from instep import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> teacher, student = accelerator.prepare(teacher=nn.Linear(2, 2), student=nn.Linear(2, 2))
            >>> accelerator.end_training()
        """
        return self._prepared.prepare(*objects, device_placement=device_placement, **named)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        name: str | None = None,
    ) -> nn.Module:
        """Move a model to the device and let the strategy wrap it. Collective.

        With mixed precision its forward runs under autocast and returns float32.

        Args:
            model: the module.
            device_placement: whether to move the model; None for the Accelerator's setting.
            evaluation_mode: whether the model is only evaluated, and not trained. If True, every rank gets the weights
                of rank 0, and a strategy such as "ddp" does not reduce the model's gradients over ranks.
            name: name in checkpoints; by default the name of the model's class.

        Returns:
            The module to call instead; with one process the model itself.

        Raises:
            SettingError: another prepared model has that name, or the name has a dot.
        """
        return self._prepared.prepare_model(model, device_placement, evaluation_mode, name)

    def prepare_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Prepare an optimizer, so that it steps only at the ends of accumulation windows. Collective.

        As with the Trainer, this call seeds random generators anew, so that ranks with different data draw different
        random numbers. Rank 0, and ranks that read the same data as rank 0, keep the state of their generators.

        Args:
            optimizer: an optimizer, whose parameters may belong to prepared models or to other models.
        """
        return self._prepared.prepare_optimizer(optimizer)

    def prepare_data_loader(
        self, loader: Any, device_placement: bool | None = None, name: str | None = None
    ) -> AcceleratedLoader:
        """Prepare a loader, so that it yields this rank's part of every batch, on its device. Collective.

        Args:
            loader: a DataLoader, or any other iterable of batches.
            device_placement: whether batches are moved to the device; None for the Accelerator's setting.
            name: name in checkpoints; by default a name made from the loader's data set.

        Raises:
            SettingError: another prepared loader has that name.
        """
        return self._prepared.prepare_data_loader(loader, device_placement, name)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler, so that it steps once per optimizer step.

        Args:
            scheduler: a scheduler that was made with the optimizer, prepared or not.
        """
        return self._prepared.prepare_scheduler(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's model from a model that `prepare` returned.

        Args:
            model: a model, wrapped or not. DataParallel and DistributedDataParallel of other packages are removed too.
            keep_fp32_wrapper: whether to keep the wrapper that sets the precision of the forward.
            keep_torch_compile: whether to keep the wrapper of `torch.compile`.
        """
        return self._prepared.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def strategy_of(self, model: nn.Module) -> Strategy:
        """Return the strategy of a prepared model, wrapped or not.

        Raises:
            UsageError: the model was not prepared by this Accelerator.
        """
        return self._prepared.strategy_of(model)

    # ---- the step

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Enter one micro-batch of an accumulation window.

        In the block, `optimizer.step()` steps only at the window's end.

        Args:
            models: the models that are trained in the block; default: all prepared models.
        """
        ends = self._prepared.window.enter(self.optimizers)
        # Without even_batches, ranks have accumulation windows of different lengths, so they must reduce gradients in
        # each micro-batch.
        syncs = ends or self._accumulation.sync_each_batch or not self.dataloader_config.even_batches
        outer, self._uses.block = self._uses.block, (tuple(map(id, models)), False) if self._uses.waits else None
        try:
            with ExitStack() as stack:
                if not syncs and self.num_processes > 1:
                    for model in models or self._prepared.models.values():
                        stack.enter_context(self.no_sync(model))
                yield
        finally:
            self._uses.block = outer
            self._prepared.window.leave()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the forward and backward of a micro-batch whose gradients need not be reduced yet.

        Args:
            model: a prepared model, wrapped or not.
        """
        return self._prepared.strategy_of(model).no_sync()

    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Backpropagate a mean loss, multiplied by its weight in the accumulation window.

        Args:
            loss: 0-dim floating tensor: the mean over this rank's micro-batch.
            num_items: number of items (such as tokens) over which the loss is a mean. The window's gradient is then
                that of the mean over all items of all micro-batches and ranks, as if they were one big batch; items of
                a batch that a rank repeats do not count. None: each loss is weighed by the number of samples in its
                micro-batch.
            kwargs: passed to `Tensor.backward`.

        Raises:
            UsageError: the loss depends on no trained parameter, or `num_items` is given for only some losses of a
                window or outside of `accumulate`.
        """
        if self._uses.waits:
            self._prepared.before_backward()
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"accelerator.backward got a {type(loss).__name__}: it takes the loss as a tensor, which a model's "
                "forward gave, without .item() or float()"
            )
        if not loss.requires_grad:
            from instep.utils.trainable import why_no_graph  # imported late: used only for an error

            optimized = [p for one in self.optimizers for group in one.param_groups for p in group["params"]]
            why = why_no_graph(self._prepared.models.values(), optimized)
            raise UsageError(f"accelerator.backward got a loss without a graph (requires_grad is False): {why}.")
        if loss.is_leaf and self.num_processes > 1 and self._prepared.models and not isinstance(loss, nn.Parameter):
            raise UsageError(f"accelerator.backward got a loss that depends on no parameter. {OTHERS_WAIT}")
        if num_items is not None:
            loss = loss * self._prepared.window.weigh_items(num_items)
        elif (weight := self._prepared.window.weigh_plainly()) != 1.0:
            loss = loss * weight
        self._prepared.plain.backward(loss, **kwargs)
        if not self.sync_gradients:
            for optimizer in self.optimizers:
                optimizer.hold_gradients()

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Remove the scaler's factor from gradients and correct them for the accumulation window, before you read them.

        Args:
            optimizer: the optimizer or optimizers whose gradients are unscaled; default: all prepared ones.
        """
        if not self.sync_gradients:
            return
        asked = self.optimizers if optimizer is None else optimizer
        for item in asked if isinstance(asked, (list, tuple)) else [asked]:
            prepared = next((known for known in self.optimizers if item is known or item is known.optimizer), None)
            if prepared is None:
                raise UsageError(f"this {type(item).__name__} was not prepared by this Accelerator")
            self._prepared.unscale(prepared)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients down if their norm is above `max_norm`, at the end of an accumulation window.

        Collective if losses came with `num_items`.

        Args:
            parameters: the parameters whose gradients are clipped.
            max_norm: the largest norm.
            norm_type: order of the norm.

        Returns:
            The norm before clipping, a 0-dim tensor; None within a window, where nothing is clipped.
        """
        if not self.sync_gradients:
            return None
        parameters = _tensors("clip_grad_norm_", parameters)
        self._prepared.unscale_owners(parameters)
        return self._prepared.plain.gradients.clip(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip every gradient element, at the end of an accumulation window.

        Collective if losses came with `num_items`.

        Args:
            parameters: the parameters whose gradients are clipped.
            clip_value: the largest absolute value.
        """
        if self.sync_gradients:
            parameters = _tensors("clip_grad_value_", parameters)
            self._prepared.unscale_owners(parameters)
            self._prepared.plain.gradients.clip(parameters, clip_value, "value")

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the precision, for computations outside of a prepared model's forward.

        Args:
            autocast_handler: other options for this block.
        """
        return self.precision.context(None if autocast_handler is None else autocast_handler.options()) or nullcontext()

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module]) -> Iterator[None]:
        """With `even_batches=False`, make ranks that have no batch left wait for the other ranks. Collective.

        At the end of the block, all ranks get the weights, optimizers and schedulers of a rank that took the most
        steps.

        Args:
            joinables: the prepared models that are trained in the block. Call `backward` without `num_items` for them:
                all ranks add up these numbers, and a rank without a batch would not take part.
        """
        window = self._prepared.window
        with ExitStack() as stack:
            window.joins = self.num_processes > 1
            stack.callback(setattr, window, "joins", False)
            for model in joinables:
                stack.enter_context(self._prepared.strategy_of(model).join())
            yield
        self._prepared.agree_on_steps()

    def profile(self, handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a torch profiler, as a context manager for the profiled code.

        Args:
            handler: options of the profiler; default: those of `kwargs_handlers`.
        """
        return profile(handler or self._handlers.get(ProfileKwargs) or ProfileKwargs(), self.process_index)

    # ---- saving

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Include objects in `save_state` and `load_state`.

        Args:
            objects: objects with `state_dict` and `load_state_dict`, whose states have only tensors and JSON values.
                Each is saved under the name of its class.
            named: objects of the same kind, each saved under its argument name.

        Raises:
            SettingError: an object lacks one of the methods, or a name is taken.
        """
        self._states.register(objects, named)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Register a hook that is called before each save, on every rank.

        Args:
            hook: `hook(models, weights, folder)`: the unwrapped models, a list of their state dicts, and the folder
                that becomes the checkpoint. The hook may change or replace state dicts. A state dict that the hook
                removes from the list is not written. Files that the hook writes into the folder become part of the
                checkpoint; only one rank may write each file. The hook must not wait for other ranks.

        Returns:
            The handle of the hook: `handle.remove()` removes it.
        """
        return HookHandle(self._states.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Register a hook that is called before each load, on every rank.

        Args:
            hook: `hook(models, folder)`: a list of the unwrapped models, and the checkpoint. The hook itself must load
                the models that it removes from the list.

        Returns:
            The handle of the hook: `handle.remove()` removes it.
        """
        return HookHandle(self._states.load_hooks, hook)

    @overload
    def save_state(
        self, output_dir: Location | None = None, safe_serialization: bool = True, *, background: Literal[False] = False
    ) -> Path: ...

    @overload
    def save_state(
        self, output_dir: Location | None = None, safe_serialization: bool = True, *, background: bool
    ) -> Path | None: ...

    def save_state(
        self, output_dir: Location | None = None, safe_serialization: bool = True, *, background: bool = False
    ) -> Path | None:
        """Save everything that was prepared or registered, and verify it. Collective.

        Args:
            output_dir: path of the folder; `-<attempt>` is added, so that nothing is overwritten. Default: a numbered
                folder in `<project_dir>/checkpoints`. After such a save, the oldest of these states of this run are
                deleted if there are more than `ProjectConfiguration(total_limit=)`.
            safe_serialization: False only warns, since a state is always safetensors and JSON.
            background: whether to return once the state is copied to host memory, and to write and verify the copy
                during the training. Later saves reuse this memory. The next save, `wait_for_saves` and `end_training`
                wait for the running save and raise its error.

        Returns:
            The folder; None for a save in the background, whose folder `wait_for_saves` returns.

        Raises:
            CheckpointError: the state could not be written, or the project's folder holds a later state of another run;
                older states are intact.
            FolderInUseError: another run saves in the project's folder. This run owns the folder from its first save to
                `end_training`.
            SettingError: two loaders, optimizers or schedulers cannot be told apart by name.
            UsageError: the run has ended.
            DistributedError: not all ranks made the call.
        """
        if not safe_serialization:
            warn_user("save_state(safe_serialization=False) has no effect: a state is always safetensors and JSON")
        self._check_open("save_state", needs_run=True)
        self.wait_for_everyone("save_state")
        return saving.save(self._states, None if output_dir is None else to_path(output_dir), background)

    def wait_for_saves(self) -> Path | None:
        """Wait for a running `save_state(background=True)`. Collective.

        Returns:
            The verified checkpoint; None if no save was running.

        Raises:
            CheckpointError: the save failed on this rank; if it failed on another rank, RemoteError.
        """
        return self._states.wait()

    def _check_open(self, name: str, needs_run: bool = False) -> None:
        """Raise UsageError if the process group is closed already; with `needs_run`, also if the run has ended."""
        if (self._world_size > 1 and not is_held()) or (needs_run and not self._prepared.is_active):
            raise UsageError(
                f"accelerator.{name} comes after end_training() or free_memory(), which released all prepared objects. "
                "Call it before; after free_memory() you may also prepare the objects again."
            )

    def load_state(self, input_dir: Location | None = None, resume: Resume | None = None, **unknown: Any) -> Path:
        """Load what `save_state` saved into the prepared and registered objects. Collective.

        The next pass of a loader continues after the last batch that was finished at the save. Random generators are
        restored too, so with the same number of processes the run continues bit for bit.

        Args:
            input_dir: the folder, with or without `-<attempt>`, or `checkpoint_<number>` of an automatically named
                state; default: the newest state of the project that verifies.
            resume: which parts to load; None for all. The part `callbacks` means the registered objects, and the part
                `position` means the step, the loaders and the random generators.
            **unknown: other arguments, which raise an error.

        Returns:
            The folder that was loaded; `resume_report` has details.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CorruptCheckpointError: the checkpoint does not verify.
            CheckpointError: the checkpoint does not fit the prepared objects.
            SettingError: an unknown argument; for an argument of Accelerate the error text has a hint.
            UsageError: the run has ended.
        """
        _refuse("load_state", unknown, "input_dir, resume")
        self._check_open("load_state", needs_run=True)
        self.wait_for_everyone("load_state")
        path = None if input_dir is None else to_path(input_dir)
        self.resume_report = saving.load(self._states, path, resume or Resume())
        return self.resume_report.path

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict of the whole model. Collective.

        Args:
            model: a prepared model, wrapped or not. For any other model, its own state dict is returned.
            unwrap: whether to use the names of the unwrapped model.

        Returns:
            Name -> plain tensor. With a sharded strategy only the main process gets it, and other ranks get an empty
            dict.
        """
        self._check_open("get_state_dict")
        if self._prepared.inner(model) is None:
            return (self.unwrap_model(model) if unwrap else model).state_dict()
        strategy = self._prepared.strategy_of(model)
        if not unwrap and not strategy.sharded:
            return model.state_dict()
        return strategy.full_model_state() if strategy.sharded else strategy.model_state()

    def save_model(
        self,
        model: nn.Module,
        save_directory: PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> Path:
        """Write a model's weights as `model.safetensors`, for any program to load. Collective.

        Args:
            model: a model, prepared or not, wrapped or not.
            save_directory: the folder, which is created if necessary.
            max_shard_size: largest size of a file in bytes, or a text such as "5GB". A larger model is split into
                several files with an index.
            safe_serialization: whether to write safetensors. False writes `pytorch_model.bin` by `torch.save`.

        Returns:
            The file; for several files, their index.
        """
        limit = parse_size("max_shard_size", max_shard_size)
        self._check_open("save_model")
        self.wait_for_everyone("save_model")
        return save_weights(self.get_state_dict(model), local_path(save_directory), limit, safe_serialization)

    def save(self, obj: Any, f: PathLike, safe_serialization: bool = False) -> None:
        """Write an object by `torch.save`, from the main process; see `instep.accelerator.save`.

        Args:
            obj: object to save.
            f: path of the file; its folder must exist.
            safe_serialization: whether to write a dict of tensors as safetensors.

        Raises:
            UnsavableStateError: the object cannot be pickled; an existing file is intact.
        """
        save(obj, f, safe_serialization=safe_serialization)

    # ---- evaluation

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False, per_sample: bool = True) -> Any:
        """Gather every rank's values for the current batch, each sample once. Collective.

        Args:
            data: nested tensors; or, without any tensor in it, a list of Python objects with one entry per sample.
            use_gather_object: whether to treat `data` as a list of Python objects although it holds tensors.
            per_sample: whether dimension 0 is the sample. Pass False for several rows per sample, or for one sum per
                batch. Then all rows are gathered, except those of a rank that replays a batch because it has none left.

        Returns:
            The same structure, with rows in the order of ranks, which is the order of the data. A 0-dim tensor becomes
            one row per rank that has samples.

        Raises:
            DataError: with `per_sample`, a tensor does not have one row per sample of the batch. If a tensor has as
                many rows as a full batch of the loader, it is cut to the samples of this batch without an error.
        """
        loader: AcceleratedLoader | None = self._prepared.run.gradient.active_dataloader
        share, size = (Share(), None) if loader is None else (loader.source.share, loader.batch_size)
        samples = share.mine
        # this rank's number of samples is unknown with an iterable data set, whose last batch may be shorter
        if samples is None and share.last and per_sample:
            data = cut_last(data, share.all, size)
        # if several ranks read the same data, only one of them counts the samples
        samples = samples if self._prepared.main_strategy.contributes else 0
        return gather_samples(data, samples, size, use_gather_object, per_sample)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches of its epoch; see `instep.accelerator.skip_first_batches`.

        Args:
            dataloader: a loader, prepared or not.
            num_batches: number of batches to leave out, counted from the epoch's beginning.
        """
        return skip_first_batches(dataloader, num_batches)

    # ---- triggers

    def set_trigger(self, name: str = "trigger", reason: str = "") -> None:
        """Set a trigger on this process, without communication. `check_trigger` then returns True on all processes.

        Args:
            name: name of the trigger.
            reason: reason for people to read.
        """
        self.triggers.set(name, reason)

    def check_trigger(self, name: str | None = None) -> bool:
        """Return True if any process has set a trigger since the last check; reset it on all processes. Collective.

        Args:
            name: name of the trigger; None for any trigger.
        """
        return self.triggers.check(name)

    # ---- collectives

    def gather(self, data: Any) -> Any:
        """Concatenate tensors of all ranks, which need equal numbers of rows; see `instep.distributed.gather`.

        Collective.

        Args:
            data: nested tensors.

        Raises:
            DistributedError: ranks have different numbers of rows, as in an epoch's last batch; use
                `gather_for_metrics` there.
        """
        return gather_rows(data, self._prepared.run.gradient.active_dataloader)

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over all ranks as `instep.distributed.reduce` does, and multiply by `scale`. Collective.

        Args:
            data: nested tensors.
            reduction: "sum", "mean", "min", "max" or "none".
            scale: a factor for the result.
        """
        result = distributed.reduce(data, reduction)
        return result if scale == 1.0 else map_leaves(lambda leaf: leaf * scale, result)

    def pad_across_processes(self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the same size on all ranks; see `instep.distributed.pad_across_processes`. Collective."""
        return distributed.pad_across_processes(data, dim, pad_index, pad_first)

    # ---- trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the loggers of `log_with`, and write the values that were logged before this call.

        Args:
            project_name: name of the W&B project. For other loggers, name of their folder below the logging folder,
                unless they have a `save_dir`.
            config: hyperparameters.
            init_kwargs: arguments by logger name, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            UsageError: the loggers are started already.
        """
        self._trackers.init(project_name, config, init_kwargs or {}, Path(self.logging_dir or "."))

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values by name, from the main process.

        Args:
            values: numbers, tensors with one element, texts if a logger supports them, or dicts of these.
            step: number of the step for the values; None: one more than in the last call; after `load_state` in a new
                program, one more than in the last call that was written before the state was saved.
            log_kwargs: further arguments for the `log` of a `GeneralTracker`, by the tracker's name.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a started logger, or with `unwrap` the object that it writes with.

        Args:
            name: "csv", "tensorboard", "wandb", or the name of a class. The second logger of one kind has "-2" at the
                end, such as "csv-2".
            unwrap: whether to return the object that the logger writes with, such as a TensorBoard writer or a wandb
                run.

        Returns:
            The logger, or the object. If `init_trackers` was called only on the main process, other processes get an
            object whose methods all do nothing.

        Raises:
            UsageError: there is no logger of that name.
        """
        return self._trackers.get(name, unwrap)

    # ---- the end of the run

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Release all prepared objects, and empty the device's cache. The Accelerator is then no longer the active run.

        Objects that are registered for checkpointing are kept. If a variable of the caller still holds an object, the
        object's memory is freed when the variable gets another value. Then torch can use this memory again, and the
        next `clear_device_cache()` returns it to other programs.

        Args:
            objects: objects whose variables get the returned None: `model, optimizer = accelerator.free_memory(model,
                optimizer)`. All prepared objects are released, not only these.

        Returns:
            One None for each object.
        """
        self._prepared.end()
        if self._states.pending is None:  # no save is running, which would still need the lease of its folder
            self._states.release()
        clear_device_cache(garbage_collection=True)
        return (None,) * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Close the loggers, end the run and leave the process group. Collective; may be called twice."""
        self._trackers.finish()
        if is_held():  # False in a second call: the process group is gone, so there are no ranks to wait for
            self.wait_for_everyone("end_training")
        self.wait_for_saves()
        self._states.close()
        self.free_memory()
        self._process.destroy_process_group()


def _tensors(method: str, parameters: Any) -> list[Tensor]:
    """Return, as a list, the parameters that were passed to a method.

    Raise SettingError if another object, such as a model, was passed.
    """
    found = parameters
    if not isinstance(parameters, nn.Module) and not callable(parameters):
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not found and isinstance(parameters, Iterator):
            warn_user(
                f"accelerator.{method} got an iterator without parameters, so it clips nothing: an iterator gives its "
                "values only once. Call model.parameters() anew in each step, or pass a list"
            )
        if all(isinstance(one, Tensor) for one in found):
            return found
    raise SettingError(
        f"accelerator.{method} takes parameters, such as model.parameters(); got {type(found).__name__}"
        f"{f' of {type(found[0]).__name__}' if isinstance(found, list) else ''}",
        field="parameters",
        got=parameters,
    )


def _refuse(method: str, unknown: Mapping[str, Any], known: str) -> None:
    """Raise a SettingError for arguments that a method does not accept."""
    for name, value in unknown.items():
        hint = instead_of(f"Accelerator.{method}", name) or f"known are {known}"
        raise SettingError(f"accelerator.{method}({name}=...) is not taken: {hint}.", field=name, got=value)
