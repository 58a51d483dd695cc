"""Loaders of a run: sharding over the ranks, limits, resuming, and the transfer of batches to the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from instep import data as room  # the code that prepares loaders is imported when a run first uses its names
from instep.data import BatchSource, DataModule
from instep.data.base import described
from instep.data.plan import derive, derive_phases, phase_at, steps_in_phases
from instep.data.prefetch import batches_through
from instep.distributed import send_to_device
from instep.errors import DataError, HookError, SettingError, UsageError
from instep.state.runs import GradientRecord
from instep.trainer.hooks import ModuleHooks, is_overridden, misspelt
from instep.trainer.module import TrainModule
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@dataclass(frozen=True)
class StageData:
    """Data of a stage of a run.

    Attributes:
        loaders: what the user gave: a loader, or loaders in a list, dict or tuple; None where there are none.
        batches: number of batches of each loader on this rank; infinity while unknown. In training the list has one
            entry, also for several loaders.
        accumulate: micro-batches per optimizer step.
        phases: mapping from an optimizer step to the value of `accumulate` from that step on; None if it does not
            change over the run.
    """

    loaders: Any = None
    batches: Sequence[int | float] = ()
    accumulate: int = 1
    phases: Mapping[int, int] | None = None


def data_of(trainer: Trainer, stage: str) -> StageData:
    """Return the data of the stage `train`, `val`, `test` or `predict`.

    This is the data of the Trainer's running call, or else of its last call that had data of this stage. If the running
    call has not requested its loaders yet, they are requested now.
    """
    ctx = trainer._ctx
    if ctx is not None and ctx.loaders.has(stage):
        return ctx.loaders.data(stage)
    return trainer._data.get(stage, StageData())


def users_loaders(trainer: Trainer, stage: str) -> Any:
    """Return the user's loaders of a stage, as `data_of` does, but do not request them: None if not requested yet."""
    ctx = trainer._ctx
    if ctx is not None and ctx.loaders.has(stage):
        return ctx.loaders.users(stage)
    return trainer._data.get(stage, StageData()).loaders


def sanity_batches(trainer: Trainer) -> list[int | float]:
    """Return, for each validation loader, how many batches the sanity check of fit takes."""
    limit = trainer.settings.num_sanity_val_steps
    runs = trainer._ctx is not None and trainer._ctx.fn == "fit"
    batches = data_of(trainer, "val" if runs else "sanity").batches
    return [count if limit == -1 else min(count, limit) for count in batches]


def estimate_steps(trainer: Trainer) -> int | float:
    """Return the number of optimizer steps of a whole fit; infinity if it is unknown."""
    s = trainer.settings
    data = StageData() if s.max_epochs == -1 else data_of(trainer, "train")
    batches = data.batches[0] if data.batches else math.inf
    if batches == math.inf:
        return s.max_steps if s.max_steps != -1 else batches
    epochs, scheduler = max(s.max_epochs, 1), accumulation_scheduler(trainer)
    if data.phases is not None:
        steps = steps_in_phases(int(batches), epochs, data.phases)
    elif scheduler is not None:
        steps = sum(math.ceil(batches / scheduler.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
    else:
        steps = math.ceil(batches / data.accumulate) * epochs
    return steps if s.max_steps == -1 else min(steps, s.max_steps)


def accumulation(trainer: Trainer) -> int:
    """Return the number of micro-batches per optimizer step in the running call, or else the Trainer's argument."""
    return trainer.settings.accumulate_grad_batches if trainer._ctx is None else trainer._ctx.loaders.accumulate


def accumulation_scheduler(trainer: Trainer) -> Any:
    """Return the callback that sets the accumulation of each epoch; None if the Trainer has none."""
    return next((callback for callback in trainer.callbacks if hasattr(callback, "get_accumulate_grad_batches")), None)


class Loaders:
    """Loaders of one run. They are prepared when they are first requested.

    Args:
        trainer: the Trainer, which has the settings, the strategy and the seed.
        module: the user's module, whose loader methods and transfer hooks are used.
        datamodule: the user's datamodule, which takes precedence over the module; or None.
        given: mapping from a stage to the loaders that the user passed to the Trainer's method.
        device: device that batches are moved to.
        gradient: gradient state, which gets the number of micro-batches per optimizer step.

    Attributes:
        accumulate: micro-batches per optimizer step; `global_batch_size` decides it when the training data is prepared.
        phases: mapping from an optimizer step to the value of `accumulate` from that step on, if `global_batch_size`
            changes over the run; else None.
        window_origin: batch of the epoch from which accumulation windows are counted.
        in_epoch: whether an epoch is running. While it runs, the user must not change `accumulate`.
        prepared_train: the training data; None before it is prepared.
        given: mapping from a stage to the loaders that the user passed; None where a loader method returns them.
        settings: settings of the Trainer; a trial may change the limits of batches in them before data is prepared.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: TrainModule,
        datamodule: DataModule | None,
        given: dict[str, Any],
        device: torch.device,
        gradient: GradientRecord,
    ) -> None:
        self._trainer, self.settings, self._strategy = trainer, trainer.settings, trainer.strategy
        self._module, self._datamodule = module, datamodule
        self.given = given
        self._device = device
        self._gradient = gradient
        self.accumulate = self.settings.accumulate_grad_batches
        self.phases: dict[int, int] | None = None
        self.window_origin = 0
        self.in_epoch = False
        self.prepared_train: BatchSource | None = None
        self._eval: dict[str, list[BatchSource]] = {}
        # False until the first validation, which uses the loaders that were requested earlier, if there are any
        self._gave_validation = False
        self._users: dict[str, Any] = {}

    def raw(self, stage: str) -> Any:
        """Return the user's loaders as they are, not prepared.

        If the run has not requested them yet, request them for this call only.
        """
        users = self._users.get(stage)
        return self._ask(stage) if users is None else users

    def has(self, stage: str) -> bool:
        """Return whether the run has this stage's loaders."""
        return stage in self.given

    def data(self, stage: str) -> StageData:
        """Return the user's loaders of a stage, with the number of batches that each gives in the run.

        `has(stage)` must be True.
        """
        sources = [self.train] if stage == "train" else self.evaluation(stage)
        counts = [math.inf if source.num_batches is None else source.num_batches for source in sources]
        return StageData(self.users(stage), counts, self.accumulate, self.phases)

    def users(self, stage: str) -> Any:
        """Return the user's loaders; None if they were not requested yet."""
        users = self._users.get(stage)
        return users.iterables if isinstance(users, room.CombinedLoader) else users

    def _raw(self, stage: str) -> Any:
        """Request the user's loaders of a stage: those that were passed, else those of the datamodule or the module."""
        self._users[stage] = users = self._ask(stage)
        return users

    def _ask(self, stage: str) -> Any:
        if self.given.get(stage) is not None:
            return self.given[stage]
        name, module, datamodule = f"{stage}_dataloader", self._module, self._datamodule
        if datamodule is not None:
            return getattr(datamodule, name)() if getattr(datamodule, name) is not None else None
        return getattr(module, name)() if is_overridden(module, name, ModuleHooks) else None

    def how_to_give(self, stage: str) -> str:
        """Return a text that says how to provide the missing data.

        If the user has a method whose name is probably a misspelling of the loader method, the text names it.
        """
        owner, base = (self._module, ModuleHooks) if self._datamodule is None else (self._datamodule, DataModule)
        name, wanted = type(owner).__name__, f"{stage}_dataloader"
        if (own := misspelt(owner, wanted, base)) is not None:
            return f"{name} has no {wanted}. It has {own}: is that it?"
        if self._datamodule is not None:
            return f"{name} has no {wanted}, or it returned None."
        return f"{self._trainer.how_to_give_data}, or give {name} a {wanted} method."

    # ---- training

    @property
    def train(self) -> BatchSource:
        """The training data, which is prepared when this is first read."""
        if self.prepared_train is None:
            with self._as_first_asked():
                raw = self._raw("train")
            self.prepared_train = self.prepare_train(raw)
        return self.prepared_train

    def prepare_train(self, raw: Any = None) -> BatchSource:
        """Prepare the training data.

        A second call gives separate data that is read from its start; it does not change the data of the training.

        Args:
            raw: the user's loaders; None for the loaders that the training began with.
        """
        raw = self._users["train"] if raw is None else raw
        settings = self.settings
        if raw is None:
            raise HookError(f"fit needs training data: {self.how_to_give('train')}")
        micro_batch = None
        if isinstance(size := settings.global_batch_size, int):
            micro_batch, self.accumulate = derive(size, self._strategy.data_world_size, _batch_size(raw))
        elif size is not None:
            micro_batch, self.phases = derive_phases(size, self._strategy.data_world_size, _batch_size(raw))
            self.accumulate = phase_at(self.phases, self._trainer.position.global_step)[0]
        limit = settings.limit("train")
        if isinstance(raw, (dict, list, tuple, room.CombinedLoader)) and not _is_batches(raw):
            combined = raw if isinstance(raw, room.CombinedLoader) else room.CombinedLoader(raw, "max_size_cycle")
            if combined.mode == "sequential":
                raise SettingError("mode='sequential' is for evaluation; fit needs another mode", field="mode")
            source = combined.map(lambda loader: self._prepare(loader, "train", 1.0, None))
            source.limit(limit, settings.limit_name("train"))
        else:
            source = self._prepare(raw, "train", limit, micro_batch)
        self._gradient.num_steps = self.accumulate
        # A checkpoint holds the position at the end of the last complete accumulation window, so the source remembers
        # the positions of one window.
        source.history = self.most_accumulated
        if source.num_batches == 0 and limit != 0:
            raise DataError(
                f"the training loader gives no batch ({'; '.join(source.empty_parts())}). Is the dataset empty, or has "
                "it with drop_last too few samples for one batch on each rank?"
            )
        return source

    @property
    def most_accumulated(self) -> int:
        """Largest number of micro-batches per optimizer step in the run, as far as it is known."""
        scheduler = accumulation_scheduler(self._trainer) if self._module.automatic_optimization else None
        scheduled = () if scheduler is None else scheduler.scheduling.values()
        return max((self.accumulate, *(self.phases or {}).values(), *scheduled))

    def begin_windows(self, step: int, batch: int, accumulate: int | None = None) -> None:
        """Start to count accumulation windows at the given batch of the epoch, with the accumulation of the given step.

        Args:
            step: optimizer steps done.
            batch: batches of the epoch done.
            accumulate: micro-batches per optimizer step from now on, used only if `phases` is None.
        """
        if self.phases is not None:
            accumulate = phase_at(self.phases, step)[0]
        self.accumulate = self._gradient.num_steps = accumulate or self.accumulate
        self.window_origin = batch

    def next_change(self, step: int) -> int | float:
        """Return the optimizer step at which `global_batch_size` changes next; infinity if it does not change."""
        return math.inf if self.phases is None else phase_at(self.phases, step)[1]

    def change_accumulation(self, accumulate: int, step: int, batch: int) -> None:
        """Set the micro-batches per optimizer step for later epochs: `trainer.accumulate_grad_batches = n`.

        Raises:
            UsageError: an epoch runs, or `global_batch_size` decides.
        """
        if self.in_epoch:
            raise UsageError(
                f"trainer.accumulate_grad_batches = {accumulate} within an epoch: set it before its first batch, in "
                "on_train_epoch_start; Trainer(global_batch_size={0: 64, 1000: 256}) changes within epochs."
            )
        if self.settings.global_batch_size is not None:
            raise UsageError(
                f"trainer.accumulate_grad_batches = {accumulate}: global_batch_size={self.settings.global_batch_size} "
                "derives it. Leave one of them out; global_batch_size={0: 64, 1000: 256} changes at step 1000."
            )
        self.begin_windows(step, batch, accumulate)
        if self.prepared_train is not None:
            self.prepared_train.history = max(self.prepared_train.history, accumulate)

    def reload_train(self) -> None:
        """Drop the training loader, so that the user's code is asked for it again when it is next needed."""
        self._close_train()
        self._trainer.position.loaded_step = self._trainer.position.global_step
        self.prepared_train = None

    # ---- evaluation

    def evaluation(self, stage: str) -> list[BatchSource]:
        """Return the loaders of `val`, `test` or `predict`; empty if there are none or their limit is 0."""
        if stage not in self._eval:
            self._eval[stage] = self._prepare_evaluation(stage)
        return self._eval[stage]

    def _prepare_evaluation(self, stage: str) -> list[BatchSource]:
        settings = self.settings
        limit = settings.limit(stage)
        stays = stage == "val" and not settings.reload_dataloaders_every_n_epochs and self.has("train")
        with self._as_first_asked() if stays else nullcontext():
            raw = None if limit == 0 else self._raw(stage)
        if raw is None:
            return []
        if isinstance(raw, room.CombinedLoader):
            if raw.mode != "sequential":
                source = raw.map(lambda loader: self._prepare(loader, stage, 1.0, None))
                source.limit(limit, settings.limit_name(stage))
                return [source]
            return raw.prepared_one_by_one(self._prepare, stage, limit)
        if isinstance(raw, dict):
            raw = list(raw.values())
        loaders = list(raw) if isinstance(raw, (list, tuple)) and not _is_batches(raw) else [raw]
        return [self._prepare(loader, stage, limit, None) for loader in loaders]

    def reload_evaluation(self) -> None:
        """Request the evaluation loaders again.

        The new loaders are put into the existing lists, so that code that holds such a list sees them.
        """
        for stage, sources in list(self._eval.items()):
            for source in sources:
                source.close()
            sources[:] = self._prepare_evaluation(stage) if sources else []

    @property
    def validates(self) -> bool:
        """Whether fit has a validation to run. Warn if there is a loader but no `validation_step`."""
        module = self._module
        # With `reload_dataloaders_every_n_epochs`, do not call the loader method here: it is called only in epochs that
        # validate. If loaders were passed to the Trainer's method, no loader method is called.
        asked = self.given.get("val") is None and self.settings.reload_dataloaders_every_n_epochs
        later = asked and self.settings.limit("val") != 0
        if not (self._has("val") if later else self.evaluation("val")):
            return False
        if not is_overridden(module, "validation_step", TrainModule):
            own = misspelt(module, "validation_step", TrainModule)
            hint = f". It has {own}: is that it?" if own else ""
            name = type(module).__name__
            warn_user(f"there is a validation loader, but {name} has no validation_step: none is run{hint}")
            self._eval["val"] = []
            return False
        return True

    def _has(self, stage: str) -> bool:
        """Return True if the user passed loaders or overrides the loader method. The method is not called here."""
        owner, base = (self._module, ModuleHooks) if self._datamodule is None else (self._datamodule, DataModule)
        return self.given.get(stage) is not None or is_overridden(owner, f"{stage}_dataloader", base)

    def validation(self, epoch: int) -> list[BatchSource]:
        """Return the validation loaders of this epoch.

        Without `reload_dataloaders_every_n_epochs`, they are requested once. With this setting they are requested in
        the first epoch that validates. An epoch that validates later requests them again, if at least this number of
        epochs has passed since the last request. A resumed run requests them in the same epochs as the interrupted
        run. A sanity check before an epoch that does not validate also requests them.
        """
        every, step = self.settings.reload_dataloaders_every_n_epochs, self.settings.check_val_every_n_epoch or 1
        if not every or self.given.get("val") is not None:  # all epochs use the same loaders
            return self.evaluation("val")
        at = self._trainer.position
        if (epoch + 1) % step == 0 and (at.val_loaded_epoch is None or epoch - at.val_loaded_epoch >= every):
            for source in self._eval.pop("val", ()) if self._gave_validation else ():
                source.close()
            at.val_loaded_epoch, at.val_loaded_step = epoch, at.global_step
        self._gave_validation = True
        of = (epoch, at.global_step) if at.val_loaded_epoch is None else (at.val_loaded_epoch, at.val_loaded_step)
        with self._as_of(*of) if epoch > of[0] or at.epoch_over else nullcontext():
            return self.evaluation("val")

    # ---- training and evaluation

    def _as_first_asked(self) -> AbstractContextManager[None]:
        """Return a context for a request of loaders, in which a loader method reads the Trainer's epoch and step.

        In a resumed run they are those at which the uninterrupted run requested the loaders. If this is the first
        request of the loaders, record the position.
        """
        at, ctx, every = self._trainer.position, self._trainer._ctx, self.settings.reload_dataloaders_every_n_epochs
        if every:
            return self._as_of(at.epoch - at.epoch % every, at.loaded_step)
        if ctx is not None and ctx.resumed_reader is not None:
            return self._as_of(at.loaded_epoch, at.loaded_step)
        at.loaded_epoch, at.loaded_step = at.epoch, at.global_step
        return nullcontext()

    @contextmanager
    def _as_of(self, epoch: int, global_step: int) -> Iterator[None]:
        """In the block, set the Trainer's epoch and step to the given ones, which a loader method may read."""
        at = self._trainer.position
        now = at.epoch, at.global_step, at.epoch_over
        at.epoch, at.global_step, at.epoch_over = epoch, global_step, False
        try:
            yield
        finally:
            at.epoch, at.global_step, at.epoch_over = now

    def _prepare(self, loader: Any, stage: str, limit: int | float, micro_batch: int | None) -> BatchSource:
        settings = self.settings
        if isinstance(loader, type) or loader is None or not hasattr(loader, "__iter__"):
            what = repr(loader) if loader is None or isinstance(loader, type) else f"a {type(loader).__name__}"
            wrap = ": a dataset. Wrap it: DataLoader(dataset, batch_size=...)" if hasattr(loader, "__getitem__") else ""
            raise DataError(f"the {stage} loader must be iterable, such as a DataLoader; got {what}{wrap}")
        source = room.prepare_loader(
            loader,
            rank=self._strategy.data_rank,
            world_size=self._strategy.data_world_size,
            seed=self._trainer.seed,
            shuffle_allowed=not settings.overfit_batches,
            use_distributed_sampler=settings.use_distributed_sampler,
            seed_samples=settings.seed_samples,
            batch_size=micro_batch,
            limit=limit,
            limit_name=settings.limit_name(stage),
            stage=stage,
            device=self._device,
            uneven=settings.uneven if stage == "train" or settings.uneven == "error" else "join",
            streams=settings.streams,
        )
        if stage != "train" and source.num_batches == 0 and limit != 0:
            warn_user(f"the {stage} loader, {described(loader)}, gives no batch: nothing is done with it")
        return source

    def on_device(self, source: BatchSource, dataloader_idx: int = 0, what: str | None = None) -> Iterator[Any]:
        """Yield the source's batches, each on the device. On CUDA the copy of a batch overlaps with the step before it.

        If the datamodule overrides at least one of the three transfer hooks, its hooks run; else the module's run.

        Args:
            source: batches on the host.
            dataloader_idx: index of the loader that they come from, for the hooks.
            what: name of the data ("validation", "test" or "predict") for errors that are raised while it is read.
        """
        module, datamodule, device = self._module, self._datamodule, self._device

        def own(name: str) -> Callable[..., Any] | None:
            if datamodule is not None and any(is_overridden(datamodule, hook, DataModule) for hook in HOOKS):
                return getattr(datamodule, name) if is_overridden(datamodule, name, DataModule) else None
            return getattr(module, name) if is_overridden(module, name, ModuleHooks) else None

        before, move, after = (own(name) for name in HOOKS)
        stages: list[Callable[[Any], Any]] = []
        if before is not None:
            stages.append(lambda batch: before(batch, dataloader_idx))
        convert = self._strategy.precision.input_converter()
        if move is None and device.type != "cpu":  # move before the cast: the result of a cast is not in pinned memory
            stages.append(lambda batch: send_to_device(batch, device, non_blocking=True))
        if convert is not None:
            stages.append(convert)
        if move is not None:
            stages.append(lambda batch: move(batch, device, dataloader_idx))
        last = None if after is None else lambda batch: after(batch, dataloader_idx)
        batches = source if what is None else _named(source, what, dataloader_idx)
        return batches_through(batches, stages, device, last)

    def _close_train(self) -> None:
        if self.prepared_train is not None:
            self.prepared_train.close()

    def close(self) -> None:
        """End loader workers. The Trainer keeps the user's loaders, and the number of batches of each."""
        known = {stage: self.data(stage) for stage in (*(["train"] if self.prepared_train else []), *self._eval)}
        self._trainer._data |= known
        if "train" in self.given and "val" in known:
            self._trainer._data["sanity"] = known["val"]
        self._close_train()
        for sources in self._eval.values():
            for source in sources:
                source.close()
        self.prepared_train, self._eval = None, {}


def _named(source: BatchSource, what: str, loader: int) -> Iterator[Any]:
    """Yield the batches. An error in reading a batch gets a note that names the data."""
    batch_idx = 0
    try:
        for batch in source:
            yield batch
            batch_idx += 1
    except Exception as error:
        from instep.data.seeding import add_note  # imported late: only an error needs it

        which = f" loader {loader}" if loader else ""
        add_note(error, f"This came from reading batch_idx {batch_idx} of the {what} data{which}.")
        raise


def _is_batches(raw: Any) -> bool:
    """Return True if a list is itself the data (numbers, tensors or lists of tensors), not a list of loaders."""
    if isinstance(raw, (dict, room.CombinedLoader)) or not raw or any(item is None for item in raw):
        return False  # a list with None is a list of loaders, in which one is missing: an error is raised later
    return not all(_is_loader(item) for item in raw)


def _is_loader(item: Any) -> bool:
    if isinstance(item, (torch.Tensor, str, bytes, int, float)) or item is None:
        return False
    if isinstance(item, dict):
        return all(_is_loader(value) for value in item.values())
    if isinstance(item, (list, tuple)):
        return not any(isinstance(part, torch.Tensor) for part in item)
    return hasattr(item, "__iter__")


def _batch_size(raw: Any) -> int:
    size = getattr(raw, "batch_size", None)
    if size is None:
        raise SettingError(
            "global_batch_size needs one training DataLoader with a batch_size, from which the batch per process and "
            f"the accumulation are derived; got {type(raw).__name__}. Use accumulate_grad_batches instead.",
            field="global_batch_size",
        )
    return size
