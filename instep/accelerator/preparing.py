"""`prepare`: from the user's objects to what a loop uses in their place, and the record of all of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instep.accelerator.facade import ProcessFacade
from instep.accelerator.handlers import GradientAccumulationPlugin
from instep.accelerator.loader import AcceleratedLoader
from instep.accelerator.wrappers import AcceleratedOptimizer, AcceleratedScheduler, Window, put_on, take_off
from instep.data import DataLoaderConfiguration, PreparedLoader, prepare_loader
from instep.distributed import broadcast_object
from instep.errors import SettingError, UsageError
from instep.state import PartialState, Run, pop_run, push_run
from instep.strategies import Precision, Strategy
from instep.utils.seed import derive_seed, seed_process


class Preparing(ProcessFacade):
    """The part of an Accelerator that prepares, and knows what it has prepared."""

    device_placement: bool
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    _strategy: Strategy
    _accumulation: GradientAccumulationPlugin

    def __init__(self, process: PartialState, precision: Precision) -> None:
        super().__init__(process)
        self.precision = precision
        self._seed: int | None = None
        self._forget()
        self._begin()

    # ---- the facts

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16" or "bf16"."""
        return self.precision.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one window."""
        return self._run.gradient.num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch in hand ends its window: gradients are reduced, optimizers step."""
        return self._run.gradient.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left out its last step because a gradient was not finite."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    @property
    def step(self) -> int:
        """Optimizer steps so far, those that were skipped included."""
        return max((optimizer.steps_taken for optimizer in self.optimizers), default=0)

    # ---- the run

    def _begin(self) -> None:
        """Become the active run."""
        plugin = self._accumulation
        self._plain = copy.deepcopy(self._strategy)  # steps, scales and says whose data is whose, for all models
        self._plain.connect(self.device, self.precision)
        self._active = True
        self._run = push_run(Run("Accelerator", self.precision.mixed_precision, self._strategy, plugin.num_steps))
        self._run.gradient.adjust_scheduler = plugin.adjust_scheduler
        self._run.gradient.sync_with_dataloader = plugin.sync_with_dataloader
        self.window = Window(self._run, self.num_processes, self.device)

    def _end(self) -> None:
        """Let go of everything; this run is not the active one any more."""
        for loader in self.dataloaders:
            loader.close()
        self._forget()
        pop_run(self._run)
        self._active = False

    def _forget(self) -> None:
        for model in getattr(self, "_models", {}).values():
            take_off(model)
        for strategy in getattr(self, "_strategies", {}).values():
            strategy.teardown()
        self._models: dict[str, nn.Module] = {}  # unwrapped, by name
        self._strategies: dict[int, Strategy] = {}  # by the id of the unwrapped model
        self._wrapped: dict[int, nn.Module] = {}
        self._checked = False  # whether the optimizers' parameters were looked for in the models
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[AcceleratedLoader] = []

    @property
    def seed(self) -> int:
        """What the order of the data is derived from: torch's seed when it was first asked for, rank 0's."""
        if self._seed is None:
            data_seed = self.dataloader_config.data_seed
            seed = torch.initial_seed() & (2**63 - 1) if data_seed is None else data_seed
            self._seed = int(broadcast_object(seed))
        return self._seed

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None, **named: Any) -> Any:
        """Make models, optimizers, loaders and schedulers ready, in any order. Collective.

        Args:
            objects: what to prepare. Anything else comes back as it is.
            device_placement: for each of `objects`, whether it is moved; None as the Accelerator says.
            named: models and loaders under a name, by which a checkpoint finds them again. Two models of one class
                need one. Optimizers and schedulers are found by the parameters they step.

        Returns:
            What the loop uses in their place, in the given order; not a tuple for a single one.

        Raises:
            SettingError: two models have one name, the placements are not as many as the objects, or one is a class.

        Example:
            >>> from instep import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> teacher, student = accelerator.prepare(teacher=nn.Linear(2, 2), student=nn.Linear(2, 2))
            >>> accelerator.end_training()
        """
        placements = [None] * len(objects) if device_placement is None else list(device_placement)
        if len(placements) != len(objects):
            raise SettingError(
                f"device_placement has {len(placements)} entries for {len(objects)} objects", field="device_placement"
            )
        for item in (*objects, *named.values()):
            if isinstance(item, type):
                raise SettingError(f"prepare() got the class {item.__name__}; give an object of it", got=item)
        items = [*[(None, it, place) for it, place in zip(objects, placements, strict=True)]]
        items += [(name, it, None) for name, it in named.items()]
        done: dict[int, Any] = {}
        # Models first: what names and moves parameters; schedulers last: they need their optimizers.
        for phase in (self._prepare_model_item, self._prepare_middle_item, self._prepare_scheduler_item):
            for index, (name, item, place) in enumerate(items):
                if index not in done:
                    prepared = phase(name, item, place)
                    if prepared is not None:
                        done[index] = prepared
        result = tuple(done.get(index, item) for index, (_, item, _) in enumerate(items))
        return result[0] if len(result) == 1 else result

    def _prepare_model_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        return self.prepare_model(item, device_placement=place, name=name) if isinstance(item, nn.Module) else None

    def _prepare_middle_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, (DataLoader, AcceleratedLoader, PreparedLoader)):
            return self.prepare_data_loader(item, device_placement=place, name=name)
        return None

    def _prepare_scheduler_item(self, name: str | None, item: Any, place: bool | None) -> Any:
        is_scheduler = hasattr(item, "step") and hasattr(item, "optimizer") and isinstance(item.optimizer, Optimizer)
        return self.prepare_scheduler(item) if is_scheduler and not isinstance(item, Optimizer) else None

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        name: str | None = None,
    ) -> nn.Module:
        """Bring a model to the device and spread it. Collective.

        With mixed precision its forward runs under autocast and gives float32 back.

        Args:
            model: the module.
            device_placement: whether to move it; None as the Accelerator says.
            evaluation_mode: it is not trained: every rank gets the first one's weights, and no more.
            name: its name in checkpoints; by default its class's.

        Returns:
            What to call in its place; with one process the module itself.

        Raises:
            SettingError: another prepared model has that name, or it has a dot.
        """
        known = self._inner(model)
        if known is not None:
            return self._wrapped[id(known)]
        model = self._strategy.unwrap(model)  # it may be what prepare returned before free_memory()
        self._claim_run()
        name = name or type(_without_compile(model)).__name__
        if "." in name:
            raise SettingError(
                f"name={name!r}: a model's name has no dots, which part the names of weights", field="name"
            )
        if name in self._models:
            raise SettingError(
                f"two models are called {name!r}, so a checkpoint could not tell them apart. Name them: "
                "accelerator.prepare(teacher=..., student=...), or prepare_model(model, name=...).",
                field="name",
                got=name,
            )
        strategy = copy.deepcopy(self._strategy)
        strategy.connect(self.device, self.precision)
        if self.device_placement if device_placement is None else device_placement:
            strategy.prepare_module(model)
        else:
            strategy.module = model
            strategy.precision.convert_module(model)
        put_on(model, strategy.precision)
        self._models[name] = model
        self._checked = False
        self._strategies[id(model)] = strategy
        if evaluation_mode:
            strategy.prepare_training(model, ())
        self._wrapped[id(model)] = model if evaluation_mode else strategy.wrap(model)
        for known in self.optimizers:
            strategy.rebind_optimizer(known.optimizer)
        return self._wrapped[id(model)]

    def prepare_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        """Make an optimizer step at the ends of windows only. Collective.

        From here on ranks draw different random numbers, as with the Trainer; the first one keeps the user's stream.

        Args:
            optimizer: over parameters of prepared models, or any others.
        """
        if type(optimizer) is AcceleratedOptimizer:
            optimizer = optimizer.optimizer
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        self._claim_run()
        for strategy in self._strategies.values():
            strategy.rebind_optimizer(optimizer)
        prepared = AcceleratedOptimizer(optimizer, self._plain, self._run.gradient, self.window)
        self.optimizers.append(prepared)
        self._checked = False
        self._separate_random_streams()
        return prepared

    def prepare_data_loader(
        self, loader: Any, device_placement: bool | None = None, name: str | None = None
    ) -> AcceleratedLoader:
        """Make a loader give this rank its part of every batch, on its device. Collective.

        Args:
            loader: a DataLoader, or any other iterable of batches.
            device_placement: whether batches are moved; None as the Accelerator says.
            name: its name in checkpoints; by default its data set's.

        Raises:
            SettingError: another prepared loader has that name.
        """
        for known in self.dataloaders:
            if known is loader or known.source is loader or known.source.loader is loader:
                return known
        if name is not None and any(known.name == name for known in self.dataloaders):
            raise SettingError(f"two loaders are called {name!r}; give each a name of its own", field="name", got=name)
        if isinstance(loader, AcceleratedLoader):
            loader = loader.source.loader  # prepared before free_memory()
        self._claim_run()
        config = self.dataloader_config
        moves = self.device_placement if device_placement is None else device_placement
        source = loader
        if not isinstance(loader, PreparedLoader):
            source = prepare_loader(
                loader,
                rank=self.main_strategy.data_rank,
                world_size=self.main_strategy.data_world_size,
                seed=self.seed,
                device=self.device if moves else None,
                split_batches=config.split_batches,
                dispatch=config.dispatch_batches,
                even_batches=config.even_batches,
                stateful=config.use_stateful_dataloader,
            )
        device = self.device if moves else None
        prepared = AcceleratedLoader(source, self._run.gradient, device, config.non_blocking, name)
        self.dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make a scheduler step once per optimizer step.

        Args:
            scheduler: made with the optimizer, prepared or not.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
        for known in self.schedulers:
            if known.scheduler is scheduler:
                return known
        self._claim_run()
        prepared = AcceleratedScheduler(
            scheduler, self.optimizers, self._run.gradient, self.window, self.step_scheduler_with_optimizer
        )
        self.schedulers.append(prepared)
        return prepared

    def _check_optimizers(self) -> None:
        """Before the first backward: a model that was forgotten in `prepare` is trained on each rank by itself."""
        self._checked = True
        known = {p for strategy in self._strategies.values() for p in strategy.parameters()}
        for prepared in self.optimizers:
            parameters = [p for group in prepared.optimizer.param_groups for p in group["params"]]
            strange = sum(p not in known for p in parameters)
            if strange:
                warnings.warn(
                    f"{strange} of the {len(parameters)} parameters of {type(prepared.optimizer).__name__} are in no "
                    "prepared model: their gradients are not reduced over processes, and save_state() does not save "
                    "them. Prepare the model too",
                    stacklevel=4,
                )

    def _claim_run(self) -> None:
        if not self._active:  # free_memory() or end_training() came before
            self._begin()

    @property
    def main_strategy(self) -> Strategy:
        """The first model's strategy, or one of its kind: all know which part of the data this rank reads."""
        return next(iter(self._strategies.values()), self._plain)

    def _separate_random_streams(self) -> None:
        """Ranks with other data draw other dropout masks; the first keeps the user's stream. As the Trainer does."""
        shared = self.seed  # a collective when first asked for
        if self.main_strategy.data_rank:
            seed = derive_seed(shared, "rank", self.main_strategy.data_rank)
            if torch.initial_seed() != seed:
                seed_process(seed)

    def precision_state(self) -> dict[str, Any]:
        """The gradient scaler's state, adapted to the last step; empty without one."""
        self._plain.gradients.update_scaler()
        return self.precision.state_dict()

    @property
    def models_by_name(self) -> dict[str, nn.Module]:
        """The prepared models, unwrapped, by their names in checkpoints."""
        return dict(self._models)

    def strategy_of(self, model: nn.Module) -> Strategy:
        """The strategy of a prepared model, wrapped or not.

        Raises:
            UsageError: it was not prepared here.
        """
        inner = self._inner(model)
        if inner is None:
            raise UsageError(f"this {type(model).__name__} was not prepared by this Accelerator: call prepare() first")
        return self._strategies[id(inner)]

    def _inner(self, model: nn.Module) -> nn.Module | None:
        """The prepared model that is meant, which may be wrapped, or compiled afterwards."""
        candidates = (model, _without_compile(model))
        for inner in self._models.values():
            if any(it is inner or it is self._wrapped[id(inner)] for it in candidates):
                return inner
        return None

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's model in what `prepare` returned.

        Args:
            model: wrapped, or not.
            keep_fp32_wrapper: False also takes the precision off its forward.
            keep_torch_compile: False also takes off what `torch.compile` put around it.
        """
        inner = self._inner(model)
        if inner is None:
            inner = self._strategy.unwrap(_without_compile(model))
        if not keep_fp32_wrapper:
            take_off(inner)
        return inner if keep_torch_compile else _without_compile(inner)


def _without_compile(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)
