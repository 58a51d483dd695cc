"""`Accelerator`: the Trainer's strategies, precision, data, loggers and checkpoints for a handwritten loop."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.accelerator.checkpointing import Checkpointing
from instep.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    by_kind,
)
from instep.accelerator.loader import AcceleratedLoader, SkippedLoader, skip_first_batches
from instep.accelerator.memory import clear_device_cache
from instep.accelerator.profiling import profile
from instep.accelerator.trackers import Trackers
from instep.accelerator.wrappers import AcceleratedOptimizer
from instep.data import DataLoaderConfiguration
from instep.distributed import Triggers, gather_object, gather_ragged
from instep.distributed.nested import iter_leaves, map_leaves
from instep.errors import DataError, SettingError, UsageError, one_of
from instep.loggers import Logger
from instep.state import PartialState, read_environment
from instep.strategies import Precision, Strategy, resolve_strategy
from instep.strategies.precision import precision_name
from instep.strategies.registry import asked_strategy
from instep.types import PathLike
from instep.utils import env
from instep.utils.porting import instead_of

PRECISION = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8"}


class Accelerator(Checkpointing):
    """Runs a loop that you write yourself on any number of processes and devices.

    It starts no processes: run the script by itself, under torchrun, or through `debug_launcher` and
    `notebook_launcher`. `prepare` takes models, optimizers, loaders and schedulers in any order and gives back what
    the loop uses in their place. Every sample of an epoch counts exactly once, in `backward` as in
    `gather_for_metrics`, and a window of accumulated gradients is the mean over its samples, the last one too.

    An Accelerator is an active run (see `AcceleratorState`) until `end_training()` or `free_memory()`.

    Args:
        device_placement: move models and batches to the device.
        mixed_precision: "no", "fp16" (not on a CPU), "bf16" or "fp8" (emulated on a CPU); None: what the variable
            INSTEP_PRECISION says, else "no".
        gradient_accumulation_steps: micro-batches of one window, used by `accumulate` and `backward`; None: what the
            variable INSTEP_ACCUMULATE_GRAD_BATCHES says, else 1.
        cpu: True uses the CPU although there is an accelerator; None: as the variable INSTEP_ACCELERATOR says.
        dataloader_config: how loaders are prepared.
        strategy: a name or a `Strategy`, as for the Trainer; each model gets a copy. None: what the variables
            INSTEP_STRATEGY and INSTEP_STRATEGY_OPTIONS say, else "auto".
        log_with: loggers: "tensorboard", "wandb", "csv", "all", a `Logger`, or a list of these.
        project_dir: where checkpoints and logs go.
        project_config: the same with more options.
        gradient_accumulation_plugin: the number of micro-batches with more options.
        step_scheduler_with_optimizer: False passes every `scheduler.step()` on.
        kwargs_handlers: `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`,
            `InitProcessGroupKwargs`, `ProfileKwargs`; one of each.
        debug: checked collectives; None: as `INSTEP_DEBUG` says.

    Raises:
        SettingError: an argument is wrong, or two of them contradict each other.
        StateError: the process state holds something else than is asked for.

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

    def __init__(
        self,
        *,
        device_placement: bool = True,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        strategy: str | Strategy | None = None,
        log_with: str | Logger | Sequence[str | Logger] | None = None,
        project_dir: PathLike | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] = (),
        debug: bool | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            known = f"known are {', '.join(sorted(inspect.signature(Accelerator).parameters))}"
            hint = instead_of("Accelerator", name) or known
            raise SettingError(f"Accelerator({name}=...) is not taken: {hint}.", field=name, got=unknown[name])
        if mixed_precision is None:
            asked = env.from_env("precision", precision_name) or "32-true"
            mixed_precision = next((short for short, name in PRECISION.items() if name == asked), asked)
        if mixed_precision not in PRECISION:
            raise one_of("mixed_precision", mixed_precision, PRECISION)
        if gradient_accumulation_plugin is None:
            steps = gradient_accumulation_steps
            steps = env.from_env("accumulate_grad_batches") if steps is None else steps
            gradient_accumulation_plugin = GradientAccumulationPlugin(num_steps=1 if steps is None else steps)
        elif gradient_accumulation_steps not in (None, 1, gradient_accumulation_plugin.num_steps):
            raise SettingError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}, but gradient_accumulation_plugin has "
                f"num_steps={gradient_accumulation_plugin.num_steps}. Give one of them.",
                field="gradient_accumulation_steps",
            )
        if project_config is not None and project_dir is not None:
            raise SettingError("give project_dir or project_config, not both", field="project_dir", got=project_dir)
        self._handlers = by_kind(kwargs_handlers)
        self._accumulation = gradient_accumulation_plugin
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        if read_environment().launcher != "none":
            from instep.health.error_report import report_failures  # late: only ranks need it

            report_failures()
        group = self._handlers.get(InitProcessGroupKwargs)
        process = PartialState(cpu=cpu, debug=debug, **({} if group is None else group.options()))
        if mixed_precision == "fp16" and process.device.type == "cpu":
            raise SettingError(
                "mixed_precision='fp16' needs a GPU: on a CPU it would silently train in float32. Use 'bf16' or 'no'.",
                field="mixed_precision",
                got=mixed_precision,
            )
        autocast, scaler = self._handlers.get(AutocastKwargs), self._handlers.get(GradScalerKwargs)
        precision = Precision(
            PRECISION[mixed_precision],
            process.device,
            scaler_options=None if scaler is None else scaler.options(),
            autocast_options=None if autocast is None else autocast.options(),
        )
        self._strategy = _resolve(strategy, process, self._handlers.get(DistributedDataParallelKwargs))
        self._trackers = Trackers(log_with, process.is_main_process)
        self.triggers = Triggers(reserved=())
        """Named triggers; `triggers.tick(step)` is the agreement that does not wait."""
        super().__init__(process, precision)  # last: it makes this the active run

    # ---- the facts

    @property
    def project_dir(self) -> str | None:
        """Where checkpoints go."""
        folder = self.project_configuration.project_dir
        return None if folder is None else os.path.expanduser(folder)

    @property
    def logging_dir(self) -> str | None:
        """Where loggers write."""
        folder = self.project_configuration.logging_dir
        return self.project_dir if folder is None else os.path.expanduser(folder)

    # ---- the step

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch of a window: forward, backward, and `step`, which acts at the window's end.

        Args:
            models: those trained here; default: all that are prepared.
        """
        ends = self.window.enter(self.optimizers)
        # Ranks that end by themselves have windows of unlike length: they must reduce in each micro-batch.
        syncs = ends or self._accumulation.sync_each_batch or not self.dataloader_config.even_batches
        try:
            with ExitStack() as stack:
                if not syncs and self.num_processes > 1:
                    for model in models or self._models.values():
                        stack.enter_context(self.no_sync(model))
                yield
        finally:
            self.window.leave()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context for the forward and backward of a micro-batch whose gradients need not be reduced yet.

        Args:
            model: prepared, wrapped or not.
        """
        return self.strategy_of(model).no_sync()

    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Backpropagate a mean loss, weighed by its share in the window.

        Args:
            loss: 0-dim floating tensor: the mean over this rank's micro-batch.
            num_items: over how many items (tokens, say) the loss is a mean. With it the window's gradient is that of
                the mean over all items of all its micro-batches and ranks, as of one big batch. Without it samples
                are counted.
            kwargs: passed to `Tensor.backward`.

        Raises:
            UsageError: `num_items` for some losses of a window only, or outside of `accumulate`.
        """
        if not self._checked:
            self._check_optimizers()
        if num_items is not None:
            loss = loss * self.window.weigh_items(num_items)
        else:
            weight = self.window.weigh_plainly()
            if weight != 1.0:
                loss = loss * weight
        if self.precision.scaler is None:
            loss.backward(**kwargs)
        else:
            self._plain.backward(loss, **kwargs)
        if not self._run.gradient.sync_gradients:
            for optimizer in self.optimizers:
                optimizer.hold_gradients()

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Take the gradient scaler's factor, and what a window is divided by, out: before looking at gradients.

        Args:
            optimizer: whose gradients; default: all that are prepared.
        """
        if not self._run.gradient.sync_gradients:
            return
        asked = self.optimizers if optimizer is None else optimizer
        for item in asked if isinstance(asked, (list, tuple)) else [asked]:
            prepared = next((known for known in self.optimizers if item is known or item is known.optimizer), None)
            if prepared is None:
                raise UsageError(f"this {type(item).__name__} was not prepared by this Accelerator")
            self._unscale(prepared)

    def _unscale(self, optimizer: AcceleratedOptimizer) -> None:
        optimizer.correct_gradients()
        self._plain.gradients.unscale(optimizer.optimizer)

    def _unscale_owners(self, parameters: Sequence[Tensor]) -> None:
        """Before these parameters' gradients are looked at; those of other optimizers may not be there yet."""
        if self.precision.scaler is not None or self.window.corrects:
            ids = {id(p) for p in parameters}
            for optimizer in self.optimizers:
                if optimizer.owns(ids):
                    self._unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale gradients down to a norm, at the end of a window. Collective where losses came with `num_items`.

        Args:
            parameters: whose gradients.
            max_norm: the largest norm.
            norm_type: which norm.

        Returns:
            The norm before, 0-dim; None within a window, where nothing is clipped.
        """
        if not self._run.gradient.sync_gradients:
            return None
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._unscale_owners(parameters)
        return self._plain.gradients.clip(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip every gradient element, at the end of a window. Collective where losses came with `num_items`.

        Args:
            parameters: whose gradients.
            clip_value: the largest absolute value.
        """
        if self._run.gradient.sync_gradients:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._unscale_owners(parameters)
            self._plain.gradients.clip(parameters, clip_value, "value")

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The precision's context, for what is computed outside of a prepared model's forward.

        Args:
            autocast_handler: other options for this block.
        """
        return self.precision.context(None if autocast_handler is None else autocast_handler.options()) or nullcontext()

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module]) -> Iterator[None]:
        """Let ranks that have no batch left wait for the others, with `even_batches=False`.

        Args:
            joinables: the prepared models that are trained inside.
        """
        with ExitStack() as stack:
            for model in joinables:
                stack.enter_context(self.strategy_of(model).join())
            yield

    def profile(self, handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """A torch profiler for the block.

        Args:
            handler: its options; default: those of `kwargs_handlers`.
        """
        return profile(handler or self._handlers.get(ProfileKwargs) or ProfileKwargs(), self.process_index)

    # ---- evaluation

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False, per_sample: bool = True) -> Any:
        """Every rank's values for the batch in hand, each sample once. Collective.

        Args:
            data: nested tensors; without any tensor in it a list of Python objects with an entry per sample.
            use_gather_object: `data` is such a list although it holds tensors.
            per_sample: False: dimension 0 is not the sample (several rows per sample, a sum per batch). Then all rows
                are taken, but for those of a rank that replays a batch because it has none left.

        Returns:
            The same structure; rows in the order of ranks, so in the order of the data. 0-dim tensors become one row
            per rank that has samples.

        Raises:
            DataError: with `per_sample`, a tensor has another number of rows than the batch has samples.
        """
        loader: AcceleratedLoader | None = self._run.gradient.active_dataloader
        mine = None if loader is None else loader.source.share.mine
        mine = mine if self.main_strategy.contributes else 0  # another rank has the same samples
        if use_gather_object or not any(isinstance(leaf, Tensor) for _, leaf in iter_leaves(data)):
            if not isinstance(data, (list, tuple)):
                raise DataError(
                    f"gather_for_metrics takes tensors, or a list of objects with an entry per sample; got "
                    f"{type(data).__name__}. For one object per rank use instep.distributed.gather_object."
                )
            rows = [] if mine == 0 else list(data)
            if mine and per_sample:
                _check_rows(len(rows), mine)
            return [row for part in gather_object(rows) for row in part]
        if mine and per_sample:
            map_leaves(lambda leaf: _check_leaf(leaf, mine), data)
        return gather_ragged(data, 0 if mine == 0 else None)

    def skip_first_batches(self, dataloader: AcceleratedLoader, num_batches: int = 0) -> SkippedLoader:
        """`instep.accelerator.skip_first_batches`.

        Args:
            dataloader: what `prepare` returned for a loader.
            num_batches: batches to leave out, counted from the epoch's beginning.
        """
        return skip_first_batches(dataloader, num_batches)

    # ---- triggers

    def set_trigger(self, name: str = "trigger", reason: str = "") -> None:
        """Set a trigger on this process; free. `check_trigger` then is True on all of them.

        Args:
            name: the trigger.
            reason: why, for people.
        """
        self.triggers.set(name, reason)

    def check_trigger(self, name: str | None = None) -> bool:
        """Whether any process has set a trigger since the last check; resets it on all. Collective.

        Args:
            name: the trigger; None for any.
        """
        return self.triggers.check(name)

    # ---- trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the loggers of `log_with`, and write what was logged before.

        Args:
            project_name: the project's name with W&B, and with other loggers the folder's below the logging folder,
                unless they have a `save_dir`.
            config: hyperparameters.
            init_kwargs: arguments by logger name, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            UsageError: they were started before.
        """
        self._trackers.init(project_name, config, init_kwargs or {}, Path(self.logging_dir or "."))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name, from the main process.

        Args:
            values: numbers, or tensors with one element.
            step: the step; None: one after the last.
        """
        self._trackers.log(values, step)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A started logger, or with `unwrap` what it writes with.

        Args:
            name: "csv", "tensorboard", "wandb", or a class's name; the second of one kind is "csv-2".
            unwrap: give what the logger writes with: a TensorBoard writer, a wandb run.

        Raises:
            UsageError: there is none of that name.
        """
        return self._trackers.get(name, unwrap)

    # ---- the end

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Let go of everything prepared and empty the device's cache; this run is not the active one any more.

        What is registered for checkpointing stays.

        Args:
            objects: names to be rebound: `model, optimizer = accelerator.free_memory(model, optimizer)`.

        Returns:
            As many Nones.
        """
        self._end()
        clear_device_cache()
        return (None,) * len(objects)

    def clear(self, *objects: Any) -> tuple[None, ...]:
        """`free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Close the loggers, end the run and leave the process group. Collective."""
        self._trackers.finish()
        self.wait_for_everyone("end_training")
        self.wait_for_saves()
        self.saver.close()
        self.free_memory()
        self._process.destroy_process_group()


def _resolve(
    strategy: str | Strategy | None, process: PartialState, options: DistributedDataParallelKwargs | None
) -> Strategy:
    count = process.num_processes
    wanted = {} if options is None or count == 1 else options.options()  # alone there is nothing to communicate
    if strategy is None:
        strategy, asked = asked_strategy()
        wanted = {**asked, **wanted}
    return resolve_strategy(strategy, count, process.device.type, wanted)


def _check_leaf(leaf: Any, samples: int) -> None:
    if isinstance(leaf, Tensor) and leaf.ndim:
        _check_rows(leaf.shape[0], samples)


def _check_rows(rows: int, samples: int) -> None:
    if rows != samples:
        raise DataError(
            f"gather_for_metrics got {rows} rows for a batch of {samples} samples on this rank. Give one row per "
            "sample of the batch in hand (the last batch may be smaller than batch_size), or say per_sample=False."
        )
