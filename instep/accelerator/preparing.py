"""`PreparedRun`: the models, optimizers, loaders and schedulers of `Accelerator.prepare`, wrapped and recorded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instep.accelerator.compiling import compiled
from instep.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from instep.accelerator.loader import AcceleratedLoader
from instep.accelerator.resuming import Uses
from instep.accelerator.unwrapping import (
    compiled_as,
    extract_model_from_parallel,
    put_on,
    take_off,
    without_compile,
)
from instep.accelerator.wrappers import AcceleratedOptimizer, AcceleratedScheduler, Window
from instep.compile import CompileConfig
from instep.data import DataLoaderConfiguration, PreparedLoader, prepare_loader
from instep.distributed import broadcast_object, gather_object
from instep.distributed.nested import map_leaves
from instep.errors import SettingError, UsageError
from instep.state import PartialState, Run, pop_run, push_run
from instep.strategies import Precision, Strategy, resolve_strategy
from instep.strategies.base import check_cuttable
from instep.strategies.gradients import parameters_of
from instep.strategies.materialize import DISPATCHED
from instep.strategies.precision import precision_name
from instep.strategies.registry import asked_strategy
from instep.utils import env
from instep.utils.checks import at_least, choice
from instep.utils.imports import require
from instep.utils.warn import warn_user

_PRECISION = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8"}


class PreparedRun:
    """Models, optimizers, loaders and schedulers that an Accelerator has prepared, and its active run.

    Args:
        process: this process.
        precision: precision of all models.
        strategy: strategy, of which each model gets a copy.
        accumulation: settings of accumulation windows.
        loader_config: how loaders are prepared.
        moves: whether models and batches are moved to the device.
        step_with_optimizer: whether schedulers step only with their optimizers.
        compile: how models are compiled; None for not at all.
    """

    loader_type: type[AcceleratedLoader] = AcceleratedLoader

    def __init__(
        self,
        process: PartialState,
        precision: Precision,
        strategy: Strategy,
        accumulation: GradientAccumulationPlugin,
        loader_config: DataLoaderConfiguration,
        moves: bool,
        step_with_optimizer: bool,
        compile: CompileConfig | None = None,
    ) -> None:
        self.device, self.rank, self.world_size = process.device, process.process_index, process.num_processes
        self.precision = precision
        self.loader_config = loader_config
        self._strategy, self._accumulation = strategy, accumulation
        self._moves, self._step_with_optimizer, self._compile = moves, step_with_optimizer, compile
        self._seed: int | None = None
        self.uses = Uses(
            lambda: [*self.models.values(), *self._wrapped.values()],
            lambda: [p for optimizer in self.optimizers for p in parameters_of(optimizer.optimizer)],
            lambda: self.dataloaders,
        )
        self._forget()
        self.begin()

    @property
    def syncs(self) -> bool:
        """Whether the current micro-batch ends its accumulation window."""
        return self.run.gradient.sync_gradients

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, including skipped ones."""
        return max((optimizer.steps_taken for optimizer in self.optimizers), default=0)

    @property
    def is_untrained(self) -> bool:
        """Whether optimizers were prepared, but no step and no training has happened yet."""
        trained = any(loader.trains or loader.batches_done is not None for loader in self.dataloaders)
        return bool(self.optimizers) and not (self.step or trained)

    # ---- the run

    def begin(self) -> None:
        """Begin a run, and make it the active one."""
        plugin = self._accumulation
        # strategy for all models: steps optimizers, scales losses, and knows which part of the data a rank reads
        self.plain = copy.deepcopy(self._strategy)
        self.plain.connect(self.device, self.precision)
        self.is_active = True
        self.run = push_run(Run("Accelerator", self.precision.mixed_precision, self._strategy, plugin.num_steps))
        self.run.gradient.adjust_scheduler = plugin.adjust_scheduler
        self.run.gradient.sync_with_dataloader = plugin.sync_with_dataloader
        self.window = Window(self.run, self.world_size, self.device)

    def end(self) -> None:
        """Release all prepared objects, and end the active run."""
        for loader in self.dataloaders:
            loader.close()
        self._forget()
        pop_run(self.run)
        self.is_active = False

    def _forget(self) -> None:
        for model in getattr(self, "models", {}).values():
            take_off(model)
        for strategy in getattr(self, "_strategies", {}).values():
            strategy.teardown()
        self.models: dict[str, nn.Module] = {}  # unwrapped models by name
        self._strategies: dict[int, Strategy] = {}  # id of an unwrapped model -> its strategy
        self._wrapped: dict[int, nn.Module] = {}
        self._given: list[Optimizer] = []  # optimizers passed to the running `prepare`
        self._ask_again()
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[AcceleratedLoader] = []

    @property
    def seed(self) -> int:
        """Seed of the data's order: `data_seed`; if it is None, rank 0's torch seed at the first use of this value."""
        if self._seed is None:
            data_seed = self.loader_config.data_seed
            seed = torch.initial_seed() & (2**63 - 1) if data_seed is None else data_seed
            self._seed = int(broadcast_object(seed))
        return self._seed

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None, **named: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order. Collective."""
        placements = [None] * len(objects) if device_placement is None else list(device_placement)
        if len(placements) != len(objects):
            raise SettingError(
                f"device_placement has {len(placements)} entries for {len(objects)} objects", field="device_placement"
            )
        for item in (*objects, *named.values()):
            if isinstance(item, type):
                raise SettingError(f"prepare() got the class {item.__name__}; give an object of it", got=item)
        items = [(None, item, place) for item, place in zip(objects, placements, strict=True)]
        items += [(name, item, None) for name, item in named.items()]
        self._given = [getattr(item, "optimizer", item) for _, item, _ in items if isinstance(item, Optimizer)]
        done: dict[int, Any] = {}
        # Prepare models first, since this may move or replace the parameters of optimizers. Prepare schedulers last,
        # since they need the prepared optimizers.
        for phase in (self._prepare_model_item, self._prepare_middle_item, self._prepare_scheduler_item):
            for index, (name, item, place) in enumerate(items):
                if index not in done:
                    prepared = phase(name, item, place)
                    if prepared is not None:
                        done[index] = prepared
        self._given = []
        result = tuple(done.get(index, item) for index, (_, item, _) in enumerate(items))
        return result[0] if len(result) == 1 else result

    def _prepare_model_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        return self.prepare_model(item, place, False, name) if isinstance(item, nn.Module) else None

    def _prepare_middle_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, (DataLoader, AcceleratedLoader, PreparedLoader)):
            return self.prepare_data_loader(item, place, name)
        return None

    def _prepare_scheduler_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        is_scheduler = hasattr(item, "step") and hasattr(item, "optimizer") and isinstance(item.optimizer, Optimizer)
        return self.prepare_scheduler(item) if is_scheduler and not isinstance(item, Optimizer) else None

    def prepare_model(self, model: nn.Module, place: bool | None, evaluates: bool, name: str | None) -> nn.Module:
        """Move a model to the device and let the strategy wrap it. Collective."""
        known = self.inner(model)
        if known is not None:
            return self._wrapped[id(known)]
        model = self._strategy.unwrap(model)  # a model that was prepared before `free_memory()` still has its wrapper
        self._claim_run()
        name = name or type(without_compile(model)).__name__
        if "." in name:
            raise SettingError(
                f"name={name!r}: a model's name has no dots, which part the names of weights", field="name"
            )
        if name in self.models:
            raise SettingError(
                f"two models are called {name!r}, so a checkpoint could not tell them apart. Name them: "
                "accelerator.prepare(teacher=..., student=...), or prepare_model(model, name=...).",
                field="name",
                got=name,
            )
        strategy = copy.deepcopy(self._strategy)
        strategy.connect(self.device, self.precision)
        check_cuttable(model, strategy)
        if place or (place is None and self._moves and not _is_dispatched(model)):
            strategy.prepare_module(model)
        else:
            strategy.module = model
            strategy.precision.convert_module(model)
        put_on(model, strategy.precision)
        self.models[name] = model
        self._ask_again()
        self._strategies[id(model)] = strategy
        wrapped = strategy.wrap_evaluated(model) if evaluates else self._wrap(strategy, model)
        self._wrapped[id(model)] = wrapped if self._compile is None else compiled(wrapped, self._compile)
        for known in self.optimizers:
            strategy.rebind_optimizer(known.optimizer)
        return self._wrapped[id(model)]

    def _wrap(self, strategy: Strategy, model: nn.Module) -> nn.Module:
        """Wrap a model that is trained.

        Some strategies wrap a model together with its optimizer; they need both in one call of `prepare`.
        """
        if not strategy.wraps_with_optimizer:
            return strategy.wrap(model)
        if self.plain in self._strategies.values():
            raise SettingError(
                f"strategy={strategy.name!r} trains one model, and {type(model).__name__} is a second one. Put both "
                "into one module, or use strategy='fsdp'; one that is not trained is prepared by "
                "prepare_model(model, evaluation_mode=True).",
                field="strategy",
                got=strategy.name,
            )
        own = set(model.parameters())
        wrapped = strategy.wrap(model, [given for given in self._given if not own.isdisjoint(parameters_of(given))])
        self.plain = strategy  # this strategy steps the optimizer, scales the loss and clips gradients itself
        return wrapped

    def prepare_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Prepare an optimizer, so that it steps only at the ends of accumulation windows. Collective."""
        if type(optimizer) is AcceleratedOptimizer:
            optimizer = optimizer.optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        self._claim_run()
        for strategy in self._strategies.values():
            strategy.rebind_optimizer(optimizer)
        prepared = AcceleratedOptimizer(optimizer, self.plain, self.run.gradient, self.window)
        self.optimizers.append(prepared)
        self._ask_again()
        self.main_strategy.separate_random_streams(self.seed)
        return prepared

    def prepare_data_loader(self, loader: Any, place: bool | None, name: str | None) -> AcceleratedLoader:
        """Prepare a loader, so that it yields this rank's part of every batch, on its device. Collective."""
        for known in self.dataloaders:
            if known is loader or known.source is loader or known.source.loader is loader:
                return known
        if name is not None and any(known.name == name for known in self.dataloaders):
            raise SettingError(f"two loaders are called {name!r}; give each a name of its own", field="name", got=name)
        if isinstance(loader, AcceleratedLoader):
            loader = loader.source.loader  # prepare the user's loader anew after free_memory()
        self._claim_run()
        config, source = self.loader_config, loader
        device = self.device if (self._moves if place is None else place) else None
        if not isinstance(loader, PreparedLoader):
            source = prepare_loader(
                loader,
                rank=self.main_strategy.data_rank,
                world_size=self.main_strategy.data_world_size,
                seed=self.seed,
                use_distributed_sampler=config.use_distributed_sampler,
                device=device,
                split_batches=config.split_batches,
                dispatch=config.dispatch_batches,
                even_batches=config.even_batches,
                uneven="join" if config.even_batches else None,
                stateful=config.use_stateful_dataloader,
                streams=config.streams,
            )
        kind = None
        # isinstance must say that the prepared loader is a StatefulDataLoader: it has that class's methods, even if the
        # data is not read through that class
        if config.use_stateful_dataloader:
            kind = require("torchdata.stateful_dataloader", extra="data", purpose="use_stateful_dataloader=True")
            kind = kind.StatefulDataLoader
        prepared = self.loader_type(
            source,
            self.run.gradient,
            self.uses,
            device,
            config.non_blocking,
            config.restore_position,
            name,
            kind,
            self.optimizers,
        )
        self.dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler, so that it steps once per optimizer step."""
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
        for known in self.schedulers:
            if known.scheduler is scheduler:
                return known
        self._claim_run()
        prepared = AcceleratedScheduler(
            scheduler, self.optimizers, self.run.gradient, self.window, self._step_with_optimizer
        )
        self.schedulers.append(prepared)
        return prepared

    def _ask_again(self) -> None:
        """Let the next backward check again whether the optimizers' parameters belong to prepared models."""
        self._checked, self.uses.waits = False, True

    def before_backward(self) -> None:
        """Check the optimizers once, and report the backward to `uses`."""
        if not self._checked:
            self._check_optimizers()
        self.uses.report_backward()

    def _check_optimizers(self) -> None:
        """Warn of parameters that are in no prepared model: each rank trains them on its own.

        Called before the first backward.
        """
        self._checked = True
        known = {p for strategy in self._strategies.values() for p in strategy.parameters()}
        for prepared in self.optimizers:
            parameters = parameters_of(prepared.optimizer)
            strange = sum(p not in known for p in parameters)
            if strange:
                kind = type(prepared.optimizer).__name__
                way = "Prepare their model too"
                if known and strange == len(parameters):
                    way = f"Make {kind} of the parameters of the model that is prepared, or prepare the other one too"
                warn_user(
                    f"{strange} of the {len(parameters)} parameters of {kind} are in no prepared model: their "
                    f"gradients are not reduced over processes, and save_state() does not save them. {way}"
                )

    def _claim_run(self) -> None:
        if not self.is_active:  # free_memory() or end_training() has ended the run, so begin a new one
            self.begin()

    @property
    def main_strategy(self) -> Strategy:
        """Strategy for facts that all strategies share, such as which part of the data this rank reads.

        With DeepSpeed, which trains only one model, it is the strategy of this model. Otherwise it is the strategy of
        the first prepared model.
        """
        trained = self.plain in self._strategies.values()
        return self.plain if trained else next(iter(self._strategies.values()), self.plain)

    def agree_on_steps(self) -> None:
        """Load the state of optimizers and schedulers from a rank that has taken the most steps. Collective."""
        steps = gather_object(self.step)
        if min(steps) == max(steps):
            return
        stateful = [*(prepared.optimizer for prepared in self.optimizers), *(one.scheduler for one in self.schedulers)]
        states = map_leaves(
            lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, [one.state_dict() for one in stateful]
        )
        mine = states, [one.steps_taken for one in self.optimizers]
        states, taken = broadcast_object(mine, steps.index(max(steps)))
        if self.step < max(steps):
            for each, state in zip(stateful, states, strict=True):
                each.load_state_dict(state)
            for optimizer, number in zip(self.optimizers, taken, strict=True):
                optimizer.steps_taken = number

    def restore_counters(self, step: int, seed: int) -> None:
        """Set the step and the seed to those of a checkpoint, and begin a new accumulation window."""
        self._seed = seed
        self.window.restart()
        for optimizer in self.optimizers:
            optimizer.restore(step)
        for loader in self.dataloaders:
            loader.source.reseed(seed)

    def unscale(self, optimizer: AcceleratedOptimizer) -> None:
        """Divide an optimizer's gradients by the scaler's factor, and correct them for the accumulation window."""
        optimizer.correct_gradients()
        self.plain.gradients.unscale(optimizer.optimizer)

    def unscale_owners(self, parameters: Sequence[Tensor]) -> None:
        """Unscale the gradients of the optimizers that own these parameters.

        Other optimizers are left alone, since they may have no gradients yet.
        """
        if self.plain.precision.scaler is not None or self.window.corrects:
            ids = {id(parameter) for parameter in parameters}
            for optimizer in self.optimizers:
                if optimizer.owns(ids):
                    self.unscale(optimizer)

    def precision_state(self) -> dict[str, Any]:
        """Return the gradient scaler's state after the last step; empty without a scaler."""
        self.plain.gradients.update_scaler()
        return self.plain.precision.state_dict()

    def strategy_of(self, model: nn.Module) -> Strategy:
        """Return the strategy of a prepared model, wrapped or not."""
        inner = self.inner(model)
        if inner is None:
            raise UsageError(f"this {type(model).__name__} was not prepared by this Accelerator: call prepare() first")
        return self._strategies[id(inner)]

    def inner(self, model: nn.Module) -> nn.Module | None:
        """Return the unwrapped prepared model that belongs to `model`; None if `model` was not prepared.

        `model` may be wrapped or compiled.
        """
        candidates = (model, without_compile(model))
        for inner in self.models.values():
            if any(one is inner or one is self._wrapped[id(inner)] for one in candidates):
                return inner
        return None

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
        """Return the user's model from a model that `prepare` returned."""
        inner = self.inner(model)
        if inner is None:
            return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper:
            take_off(inner)
        if not keep_torch_compile:
            return without_compile(inner)
        return inner if inner is not without_compile(inner) else compiled_as(model, inner)

    def set_accumulation(self, num_steps: int) -> None:
        """Change the length of accumulation windows, from the next window on."""
        self._accumulation = replace(self._accumulation, num_steps=num_steps)
        self.window.set_length(num_steps)


def choose_strategy(
    strategy: str | Strategy | None, process: PartialState, options: DistributedDataParallelKwargs | None
) -> Strategy:
    """Return the strategy that the argument or the environment asks for."""
    count = process.num_processes
    # a single process needs no options for communication
    wanted = {} if options is None or count == 1 else options.options()
    if strategy is None:
        strategy, asked = asked_strategy()
        wanted = {**asked, **wanted}
    return resolve_strategy(strategy, count, process.device.type, wanted)


def precision_asked_for(mixed_precision: str | None) -> str:
    """Return the name of the precision: the argument, else the value of the environment variable, else "no"."""
    if mixed_precision is None:
        asked = env.from_env("precision", precision_name) or "32-true"
        mixed_precision = next((short for short, name in _PRECISION.items() if name == asked), asked)
    return choice(*_PRECISION)("mixed_precision", mixed_precision)


def make_precision(mixed_precision: str, device: torch.device, handlers: Mapping[type, Any]) -> Precision:
    """Make the precision of all models of a run, with the options in `kwargs_handlers`."""
    if mixed_precision == "fp16" and device.type == "cpu":
        raise SettingError(
            "mixed_precision='fp16' needs a GPU: on a CPU it would silently train in float32. Use 'bf16' or 'no'.",
            field="mixed_precision",
            got=mixed_precision,
        )
    autocast, scaler = handlers.get(AutocastKwargs), handlers.get(GradScalerKwargs)
    return Precision(
        _PRECISION[mixed_precision],
        device,
        scaler_options=None if scaler is None else scaler.options(),
        autocast_options=None if autocast is None else autocast.options(),
    )


def accumulation_asked_for(plugin: GradientAccumulationPlugin | None, steps: int | None) -> GradientAccumulationPlugin:
    """Return the accumulation settings: the plugin or argument, else the value of the environment variable, else 1."""
    if plugin is None:
        if steps is not None:
            at_least(1)("gradient_accumulation_steps", steps)
        steps = env.from_env("accumulate_grad_batches") if steps is None else steps
        return GradientAccumulationPlugin(num_steps=1 if steps is None else steps)
    if steps not in (None, 1, plugin.num_steps):
        raise SettingError(
            f"gradient_accumulation_steps={steps}, but gradient_accumulation_plugin has "
            f"num_steps={plugin.num_steps}. Give one of them.",
            field="gradient_accumulation_steps",
        )
    return plugin


def _is_dispatched(model: nn.Module) -> bool:
    """Return True if `dispatch_model` has divided a model over devices; the model must not be moved then."""
    return "hf_device_map" in vars(model) and DISPATCHED in vars(model)
