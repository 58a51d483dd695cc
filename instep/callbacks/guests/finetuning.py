"""Fine-tuning callbacks: layers are frozen at first, and trained from a later epoch on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from instep.callbacks.base import Callback
from instep.errors import CheckpointError, HookError, SettingError
from instep.utils.checks import FLAG, Check, above_zero, at_least, or_none
from instep.utils.optimizer_state import clean_name, names_of
from instep.utils.optimizers import RATES, active_leaves, leaves_of, note_rates, put_rate
from instep.utils.rank_zero import rank_zero_only
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MOMENTA = ("base_momentum", "max_momentum")  # keys of a parameter group in which schedulers keep their momentum limits
_RATES_PER_GROUP = ("base_lrs", "max_lrs")
_PER_GROUP = (*_RATES_PER_GROUP, "min_lrs", "lr_lambdas", "base_momentums", "max_momentums")

Modules = nn.Module | Iterable[Any]
"""A module, or a nested iterable of modules."""


class BaseFinetuning(Callback):
    """Freeze parts of a module before training, and unfreeze them at the start of later epochs.

    Override `freeze_before_training` and `finetune_function`. `freeze_before_training` runs before
    `configure_optimizers`, which should give the optimizer only parameters that require gradients. `finetune_function`
    runs at the start of every epoch, once for each optimizer.

    A checkpoint holds the names of the frozen parameters and the optimizer's parameter groups. A resumed run gets the
    same groups before the optimizer's state is loaded, also if it resumes within an epoch, under another strategy or
    with another world size. The learning rate of a new group follows the schedule of the first group, scaled to the
    rate with which the group was added.

    Raises:
        SettingError: (at the start of the run) the strategy cannot add parameter groups (DeepSpeed).
        HookError: `freeze_before_training` or `finetune_function` is not overridden.

    Example:
        >>> class UnfreezeEncoder(BaseFinetuning):
        ...     def __init__(self, epoch):
        ...         super().__init__()
        ...         self.epoch = epoch
        ...
        ...     def freeze_before_training(self, module):
        ...         self.freeze(module.encoder)
        ...
        ...     def finetune_function(self, module, epoch, optimizer):
        ...         if epoch == self.epoch:
        ...             self.unfreeze_and_add_param_group(module.encoder, optimizer)
        >>> layer = nn.Linear(2, 2)
        >>> BaseFinetuning.freeze(layer)
        >>> layer.weight.requires_grad
        False
    """

    runs_first = True  # so that other callbacks see an epoch's rates and frozen layers at its start

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        """Optimizer's index -> its parameter groups after the last `finetune_function`, with names of parameters."""
        self._frozen: list[str] = []
        self._untracked: list[str] = []  # BatchNorm layers without running statistics
        self._tuned_epoch: int | None = None
        self._fitted: ref[nn.Module] | None = None
        self._restarting = False

    # ---- methods to override

    def freeze_before_training(self, module: TrainModule) -> None:
        """Freeze the layers that are trained later, by calling `freeze`. Called before `configure_optimizers`."""
        raise HookError(f"{type(self).__name__} has no freeze_before_training(module); BaseFinetuning calls it")

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the layers that are trained from this epoch on. Called once for each epoch and optimizer."""
        raise HookError(
            f"{type(self).__name__} has no finetune_function(module, epoch, optimizer); BaseFinetuning calls it"
        )

    # ---- helpers for the methods to override

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all modules and submodules that have no children or have parameters of their own.

        Args:
            modules: a module, or an iterable of modules; iterables may be nested.
        """
        if isinstance(modules, nn.Module):
            every: Iterable[nn.Module] = modules.modules()
        else:
            every = [found for part in modules for found in BaseFinetuning.flatten_modules(part)]
        return [module for module in every if module._parameters or not any(True for _ in module.children())]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of modules, or their frozen parameters.

        Args:
            modules: a module, or a (nested) iterable of modules.
            train_bn: whether to include parameters of BatchNorm layers.
            requires_grad: True: yield the trainable parameters. False: yield the frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad:
                        yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters of modules, and turn on the running statistics of their BatchNorm layers."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters, not those of its children; stop the updates of BatchNorm statistics."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of modules and all their submodules.

        Args:
            modules: a module, or a (nested) iterable of modules.
            train_bn: True: BatchNorm layers stay trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have yet; warn if it already has some of them."""
        there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        every = list(dict.fromkeys(params))  # remove duplicates: a tied parameter occurs twice
        new = [parameter for parameter in every if id(parameter) not in there]
        if len(new) < len(every):
            name = type(optimizer).__name__
            _warn(
                "The provided params to be frozen already exist within another group of this optimizer: "
                f"{len(every) - len(new)} of {len(every)}, which are left where they are. Did you init your optimizer "
                f"in `configure_optimizers` with all parameters? Give it those that are trained from the start: {name}"
                "(filter(lambda p: p.requires_grad, self.parameters()), ...)"
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to the optimizer as a new parameter group.

        Args:
            modules: a module, or a (nested) iterable of modules.
            optimizer: the optimizer; parameters that it already has stay in their group.
            lr: the new group's learning rate. None: the first group's rate divided by `initial_denom_lr`.
            initial_denom_lr: divisor of the first group's rate; not used if `lr` is given.
            train_bn: whether the new group includes parameters of BatchNorm layers.
        """
        BaseFinetuning.make_trainable(modules)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        trained = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        # BatchNorm layers are usually trained from the start, so the optimizer already has them.
        norms = BaseFinetuning._norms_of(modules, optimizer)
        new = BaseFinetuning.filter_on_optimizer(optimizer, [p for p in trained if id(p) not in norms])
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})

    @staticmethod
    def _norms_of(modules: Modules, optimizer: Optimizer) -> set[int]:
        """Return the ids of those BatchNorm parameters of `modules` that the optimizer already has."""
        layers = [layer for layer in BaseFinetuning.flatten_modules(modules) if isinstance(layer, _BatchNorm)]
        own = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        return own & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and not trainer.strategy.takes_new_groups:
            strategy = type(trainer.strategy).__name__.removesuffix("Strategy")
            raise SettingError(
                f"{type(self).__name__} does not support running with the {strategy} strategy, whose engine takes no "
                "parameter groups while it trains. Use strategy='fsdp' or 'ddp'; or, without this callback, give the "
                "optimizer all parameters from the start, in groups with schedules of their own.",
                field="strategy",
                got=trainer.strategy.name,
            )
        if stage == "fit":
            again = trainer.global_step > 0 and self._fitted is not None and self._fitted() is module
            if not again:
                self._internal_optimizer_metadata, self._tuned_epoch = {}, None
            self._restarting = again and bool(self._internal_optimizer_metadata)
            self._fitted = ref(module)
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Freeze parameters and add parameter groups as in the checkpoint, or as at the end of the previous fit."""
        if self._restarting:
            self._restore(trainer, module)
            self._restarting = False

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if epoch == self._tuned_epoch:
            return  # the run was resumed within this epoch, so `finetune_function` has already run
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for index, optimizer in enumerate(trainer.optimizers):
            before = [float(group["lr"]) for group in optimizer.param_groups]
            self.finetune_function(module, epoch, optimizer)
            groups = optimizer.param_groups
            changed = [i for i in range(1, len(groups)) if i >= len(before) or float(groups[i]["lr"]) != before[i]]
            if changed:
                schedule_groups(optimizer, schedulers, changed, before[0])
            names = names_of(module, [optimizer])
            self._internal_optimizer_metadata[index] = [
                {**group, "params": [names[parameter] for parameter in group["params"]]} for group in groups
            ]
        self._frozen = [name for parameter, name in names_of(module).items() if not parameter.requires_grad]
        self._untracked = [
            clean_name(name)
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and not part.track_running_stats
        ]
        self._tuned_epoch = epoch

    def _restore(self, trainer: Trainer, module: TrainModule) -> None:
        for parameter, name in names_of(module).items():
            parameter.requires_grad_(not any(known in self._frozen for known in _aliases(name)))
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm):
                part.track_running_stats = clean_name(name) not in self._untracked
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for index, optimizer in enumerate(trainer.optimizers):
            saved = self._internal_optimizer_metadata.get(index)
            if saved is not None:
                count = len(optimizer.param_groups)
                self._restore_groups(module, optimizer, saved)
                added = range(max(1, count), len(optimizer.param_groups))
                if added:
                    schedule_groups(optimizer, schedulers, added)

    def _restore_groups(self, module: TrainModule, optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
        named = names_of(module, [optimizer]).items()
        parameters = {known: parameter for parameter, name in named for known in _aliases(name)}
        missing = [name for group in saved for name in group["params"] if name not in parameters]
        if missing:
            raise CheckpointError(
                f"the optimizer of the checkpoint had parameters that {type(module).__name__} does not have: "
                f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}. Resume with the module of that run, or from "
                "the weights alone by fit(..., resume=Resume.weights())."
            )
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in saved]
        own = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
        if own != [{id(parameter) for parameter in group["params"]} for group in groups[: len(own)]]:
            # `finetune_function` may have moved parameters between groups, so make all groups anew.
            optimizer.param_groups.clear()
        for group in groups[len(optimizer.param_groups) :]:
            optimizer.add_param_group(group)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "internal_optimizer_metadata": dict(self._internal_optimizer_metadata),
            "frozen": self._frozen,
            "untracked": self._untracked,
            "epoch": self._tuned_epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._internal_optimizer_metadata = state_dict["internal_optimizer_metadata"]
        self._frozen, self._untracked = state_dict["frozen"], state_dict["untracked"]
        self._tuned_epoch = state_dict["epoch"]
        self._restarting = self._tuned_epoch is not None


def _aliases(name: str) -> tuple[str, ...]:
    """Return the names that the parameter may have in the checkpoint: `ModelPruning` adds `_orig` to names."""
    return (f"{name}_orig", name.removesuffix("_orig"), name)


@rank_zero_only
def _warn(text: str) -> None:
    warn_user(text)


def multiplicative(epoch: int) -> float:
    """Return 2, so that the backbone's learning rate doubles at every epoch."""
    return 2.0


_FUNCTION = Check(callable, "a function of the epoch's number that returns a factor, such as lambda epoch: 1.5")


class BackboneFinetuning(BaseFinetuning):
    """Train `module.backbone` from a given epoch on, with a learning rate that grows to that of the other layers.

    Args:
        unfreeze_backbone_at_epoch: epoch from which the backbone is trained; epochs count from 0.
        lambda_func: function that takes the number of the epoch plus one, and returns the factor by which the
            backbone's learning rate is multiplied at the start of that epoch.
        backbone_initial_ratio_lr: the backbone's first rate, as a fraction of the first group's rate.
        backbone_initial_lr: the backbone's first rate; if given, `backbone_initial_ratio_lr` is not used.
        should_align: whether the backbone's rate stops growing when it reaches the first group's rate, and then
            follows that rate.
        initial_denom_lr: an argument of Lightning's; it has no effect.
        train_bn: whether the new parameter group includes those BatchNorm parameters of the backbone that the optimizer
            does not have yet. BatchNorm layers stay trainable while the other layers of the backbone are frozen.
        verbose: print the rates.
        rounding: number of decimal digits of the printed rates.

    Raises:
        SettingError: an argument is wrong. (At the start of the run:) the module has no `backbone`, or the strategy
            cannot add parameter groups (DeepSpeed).

    Example:
        >>> BackboneFinetuning(unfreeze_backbone_at_epoch=3, lambda_func=lambda epoch: 1.5).unfreeze_backbone_at_epoch
        3
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        positive = above_zero("above 0")
        self.unfreeze_backbone_at_epoch = at_least(0)("unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch)
        self.lambda_func = _FUNCTION("lambda_func", lambda_func)
        self.backbone_initial_ratio_lr = positive("backbone_initial_ratio_lr", backbone_initial_ratio_lr)
        self.backbone_initial_lr = or_none(positive)("backbone_initial_lr", backbone_initial_lr)
        self.should_align = FLAG("should_align", should_align)
        self.initial_denom_lr = positive("initial_denom_lr", initial_denom_lr)
        self.train_bn = FLAG("train_bn", train_bn)
        self.verbose = FLAG("verbose", verbose)
        self.rounding = at_least(0)("rounding", rounding)
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not isinstance(getattr(module, "backbone", None), nn.Module):
            raise SettingError(
                f"{type(module).__name__}: The TrainModule should have a nn.Module `backbone` attribute, which "
                "BackboneFinetuning freezes: set it in __init__, or write a BaseFinetuning of your own."
            )
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: TrainModule) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        lr = float(optimizer.param_groups[0]["lr"])
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            rate = lr * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(module.backbone, optimizer, rate, self.initial_denom_lr, self.train_bn)
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            grown = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = lr if self.should_align and grown > lr else grown
            optimizer.param_groups[-1]["lr"] = rate
        else:
            return
        self.previous_backbone_lr = rate
        if self.verbose:
            module.print(f"Current lr: {round(lr, self.rounding)}, Backbone lr: {round(rate, self.rounding)}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


# ---- schedules of new groups


def schedule_groups(
    optimizer: Optimizer, schedulers: Sequence[Any], changed: Iterable[int], lr: float | None = None
) -> None:
    """Apply learning-rate schedulers to parameter groups that were added, or whose rate was set by hand.

    torch's schedulers know only the groups that the optimizer had when the scheduler was made. Each of the changed
    groups gets the schedule of the first group, scaled to the current rate of the changed group.

    Args:
        optimizer: the optimizer, whose groups have their current rates.
        schedulers: torch's schedulers; those of other optimizers are not changed.
        changed: indices of the groups that were added or changed; 0 is not allowed.
        lr: the rate that the schedule gives to the first group now. None: the first group's current rate.
    """
    own = [leaf for scheduler in schedulers for leaf in leaves_of(scheduler)]
    own = [leaf for leaf in own if getattr(leaf, "optimizer", None) is optimizer]
    active = {id(leaf) for scheduler in schedulers for leaf in active_leaves(scheduler)}
    floor = max((float(getattr(leaf, "eta_min", 0.0)) for leaf in own if id(leaf) in active), default=0.0)
    first = optimizer.param_groups[0]
    begun, lr = float(first.get("initial_lr", first["lr"])), float(first["lr"]) if lr is None else lr
    for index in sorted(changed):
        group = optimizer.param_groups[index]
        now = float(group["lr"])
        begins = now if lr == floor else floor + (now - floor) * (begun - floor) / (lr - floor)
        scale = begins / begun if begun else 1.0
        for key in RATES[1:]:
            if key in first:
                put_rate(group, key, float(first[key]) * scale)
        for key in _MOMENTA:
            if key in first:
                group.setdefault(key, first[key])
        for leaf in own:
            _schedule_group(leaf, index, scale)
    note_rates((*schedulers, *own), optimizer)


def _schedule_group(leaf: Any, index: int, scale: float) -> None:
    """Set the entry of group `index` in each per-group list of a scheduler, by scaling the first group's entry."""
    for name in _PER_GROUP:
        values = getattr(leaf, name, None)
        if not isinstance(values, list) or not values:
            continue
        if index == len(values):
            values.append(deepcopy(values[0]))  # copied, since groups must not share a function object with state
        if name in _RATES_PER_GROUP:
            put_rate(values, index, float(values[0]) * scale)
