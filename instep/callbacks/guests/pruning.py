"""`ModelPruning`: set weights to zero during training with `torch.nn.utils.prune`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from instep.callbacks.base import Callback
from instep.distributed import broadcast
from instep.errors import SettingError
from instep.utils.checks import FLAG, wrong
from instep.utils.optimizer_state import clean_name

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

log = logging.getLogger(__name__)

_FUNCTIONS = {
    "ln_structured": torch_prune.ln_structured,
    "l1_unstructured": torch_prune.l1_unstructured,
    "random_structured": torch_prune.random_structured,
    "random_unstructured": torch_prune.random_unstructured,
}
_METHODS = {
    "ln_structured": torch_prune.LnStructured,
    "l1_unstructured": torch_prune.L1Unstructured,
    "random_structured": torch_prune.RandomStructured,
    "random_unstructured": torch_prune.RandomUnstructured,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Places = Sequence[tuple[nn.Module, str]]
"""Pairs of a module and the name of one of its parameters."""


class ModelPruning(Callback):
    """Prune parameters with `torch.nn.utils.prune`, at the end of each training epoch or after each validation.

    torch replaces a pruned parameter `weight` by a parameter `weight_orig` and a mask `weight_mask`, whose product is
    `weight`. All ranks use the first rank's masks. The callback saves the masks, and the initial values if the lottery
    ticket hypothesis needs them, so that a resumed run is the same bit for bit. With `make_pruning_permanent`, a
    checkpoint holds plain weights under their own names, with zeros where they are pruned.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured", or a subclass of
            torch's `BasePruningMethod`.
        parameters_to_prune: pairs of a module and a parameter's name. By default all parameters whose name is in
            `parameter_names`; override `filter_parameters_to_prune` to leave some out.
        parameter_names: list of names of the parameters to prune: "weight", "bias" or (the default) both.
        use_global_unstructured: choose the elements to prune among all parameters together, not in each parameter.
        amount: how many elements to prune each time: an int for their number, or a float from 0 to 1 for their fraction
            of the elements that are not pruned yet. Or a function that takes the epoch and returns one of these.
        apply_pruning: whether to prune; or a function that takes the epoch and returns this.
        make_pruning_permanent: save plain weights, and leave plain weights in the module at the end of fit.
        use_lottery_ticket_hypothesis: whether elements that are not pruned get their values from the start of training
            again, after each pruning; or a function that takes the epoch and returns this.
        resample_parameters: whether these elements get new random values instead, by the module's `reset_parameters`;
            needs `use_lottery_ticket_hypothesis`.
        pruning_dim: the dimension along which structured pruning removes slices.
        pruning_norm: the order of the norm of "ln_structured".
        verbose: 1: log how much is pruned in total; 2: for every parameter too (by `logging`, at level INFO).
        prune_on_train_epoch_end: True: prune at the end of training epochs. False: prune after validations.

    Raises:
        SettingError: an argument is wrong. (At the start of the run:) a parameter does not belong to the module, or the
            strategy shards parameters (FSDP, DeepSpeed), which torch's pruning does not support.

    Example:
        >>> ModelPruning("l1_unstructured", amount=0.2).amount
        0.2

    Source:
        Frankle, Carbin: The Lottery Ticket Hypothesis, ICLR 2019 (https://arxiv.org/abs/1803.03635).
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Places = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: float | Callable[[int], float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._use_global_unstructured = FLAG("use_global_unstructured", use_global_unstructured)
        self._given = self._parameters_to_prune = parameters_to_prune
        self._parameter_names = parameter_names or self.PARAMETER_NAMES
        unknown = [name for name in self._parameter_names if name not in self.PARAMETER_NAMES]
        if unknown:
            raise SettingError(
                f"The provided `parameter_names` name: {unknown[0]} isn't in {self.PARAMETER_NAMES}",
                field="parameter_names",
                got=parameter_names,
            )
        self._options: dict[str, Any] = {}
        self.pruning_fn = self._method(pruning_fn, pruning_dim, pruning_norm)
        if not callable(amount) and (isinstance(amount, bool) or not isinstance(amount, int | float)):
            raise SettingError(
                f"amount={amount!r}: `amount` should be provided and be either an int, a float or Callable function.",
                field="amount",
                got=amount,
            )
        most = 1 if isinstance(amount, float) else math.inf
        if not callable(amount) and not 0 <= amount <= most:
            raise wrong("amount", amount, "a fraction from 0.0 to 1.0, or a number of elements as an integer from 0 on")
        if verbose not in (0, 1, 2):
            raise SettingError(f"verbose={verbose!r}: `verbose` must be any of (0, 1, 2)", field="verbose", got=verbose)
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = FLAG("make_pruning_permanent", make_pruning_permanent)
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = FLAG("resample_parameters", resample_parameters)
        self._verbose = verbose
        self._prune_on_train_epoch_end = FLAG("prune_on_train_epoch_end", prune_on_train_epoch_end)
        self._original_layers: dict[int, dict[str, Any]] | None = None
        self._module_names: dict[int, str] = {}  # the name of each submodule, by the `id` of the submodule
        self._masks: dict[str, Tensor] = {}  # masks of the checkpoint that the run resumes from
        self._first: dict[str, Tensor] = {}
        self._world_size = 1
        self._rank = 0

    def _method(self, given: Any, dim: int | None, norm: int | None) -> Any:
        """Check the method and its arguments; return its class for global pruning, else a function for one tensor."""
        if isinstance(given, str):
            given = given.lower()
            if given not in _FUNCTIONS:
                raise SettingError(
                    f"The provided `pruning_fn` {given} isn't available in PyTorch's built-in functions: "
                    f"{list(_FUNCTIONS)}",
                    field="pruning_fn",
                    got=given,
                )
            if given.endswith("_structured") and not given.endswith("unstructured"):
                if dim is None:
                    raise self._lacking("structured", "pruning_dim")
                self._options["dim"] = dim
            if given == "ln_structured":
                if norm is None:
                    raise self._lacking("ln_structured", "pruning_norm")
                self._options["n"] = norm
            method: Any = _METHODS[given]
        elif self._is_pruning_method(given):
            if not self._use_global_unstructured:
                raise SettingError(
                    "PyTorch `BasePruningMethod` is currently only supported with `use_global_unstructured=True`.",
                    field="pruning_fn",
                    got=given,
                )
            method = given
        else:
            raise SettingError(
                f"`pruning_fn` is expected to be a str in {list(_FUNCTIONS)} or a PyTorch `BasePruningMethod`. Found: "
                f"{given}. Pass the class of a method, not an object of it.",
                field="pruning_fn",
                got=given,
            )
        if self._use_global_unstructured and method.PRUNING_TYPE != "unstructured":
            raise SettingError(
                'Only the "unstructured" PRUNING_TYPE is supported with `use_global_unstructured=True`. Found method '
                f"{method.__name__} of type {method.PRUNING_TYPE}: set use_global_unstructured=False.",
                field="use_global_unstructured",
                got=True,
            )
        self._pruning_method_name = method.__name__
        if self._use_global_unstructured:
            return method
        self._pruning_method_name = given
        return partial(_FUNCTIONS[given], **self._options)

    @staticmethod
    def _lacking(kind: str, field: str) -> SettingError:
        return SettingError(f"When requesting `{kind}` pruning, the `{field}` should be provided.", field=field)

    @staticmethod
    def _is_pruning_method(method: Any) -> bool:
        return inspect.isclass(method) and issubclass(method, torch_prune.BasePruningMethod)

    # ---- which parameters

    def filter_parameters_to_prune(self, parameters_to_prune: Places = ()) -> Places:
        """Return the pairs of a module and a parameter's name to prune. Override this method to leave some out."""
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Places = (), parameter_names: Sequence[str] = ()
    ) -> Places:
        """Check the pairs of a module and a parameter's name; if none are given, find all pairs in the module.

        Args:
            pl_module: the module that contains the modules of the pairs.
            parameters_to_prune: the pairs; if empty, those of all submodules with a parameter in `parameter_names`.
            parameter_names: names of parameters, used if no pairs are given; "weight" and "bias" by default.

        Raises:
            SettingError: `parameters_to_prune` is not a list of pairs, or `pl_module` has no such module or parameter.
        """
        names = parameter_names or ModelPruning.PARAMETER_NAMES
        modules = [part for part in pl_module.modules() if part is not pl_module and not isinstance(part, _CONTAINERS)]
        if not parameters_to_prune:
            return [
                (part, name)
                for name in names
                for part in modules
                if isinstance(getattr(part, name, None), nn.Parameter) or hasattr(part, f"{name}_orig")
            ]
        pairs = isinstance(parameters_to_prune, list | tuple) and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and isinstance(pair[0], nn.Module)
            and isinstance(pair[1], str)
            for pair in parameters_to_prune
        )
        if not pairs:
            raise SettingError(
                "The provided `parameters_to_prune` should either be list of tuple with 2 elements: (nn.Module, "
                "parameter_name_to_prune) or None",
                field="parameters_to_prune",
                got=parameters_to_prune,
            )
        missing_modules = [part for part, _ in parameters_to_prune if not any(part is own for own in modules)]
        missing_names = [name for part, name in parameters_to_prune if not hasattr(part, name)]
        if missing_modules or missing_names:
            raise SettingError(
                "Some provided `parameters_to_prune` don't exist in the model. Found missing modules: "
                f"{missing_modules} and missing parameters: {missing_names}",
                field="parameters_to_prune",
            )
        return parameters_to_prune

    # ---- pruning

    def apply_pruning(self, amount: float) -> None:
        """Prune the parameters once, with the masks of the first rank on all ranks. Collective: all ranks call it."""
        places = self._parameters_to_prune
        before = [self._pruned(part, name) for part, name in places] if self._verbose else []
        for part, _ in places:
            _refresh(part)  # compute `weight` again, since the optimizer has changed `weight_orig`
        if self._use_global_unstructured:
            taken = set(inspect.signature(self.pruning_fn).parameters) - {"self"}
            options = {key: value for key, value in {**self._options, "amount": amount}.items() if key in taken}
            torch_prune.global_unstructured(places, pruning_method=self.pruning_fn, **options)
        else:
            for part, name in places:
                self.pruning_fn(part, name=name, amount=amount)
        for part, name in places if self._world_size > 1 else ():
            mask = getattr(part, f"{name}_mask", None)
            if mask is not None:
                mask.copy_(broadcast(mask))
        for part, _ in places:
            _refresh(part)
        if self._verbose and self._rank == 0:
            self._log_sparsity(before, [self._pruned(part, name) for part, name in places], amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Give the weights that are not pruned their initial values again, or new random values. Collective."""
        assert self._original_layers is not None
        for layer in self._original_layers.values():
            first = layer["data"]
            if self._resample_parameters and callable(getattr(first, "reset_parameters", None)):
                first = deepcopy(first)
                first.reset_parameters()
            for index, name in layer["names"]:
                part, _ = self._parameters_to_prune[index]
                self._copy_param(part, first, name)
                _refresh(part)

    def _copy_param(self, new: nn.Module, old: nn.Module, name: str) -> None:
        into = new._parameters.get(f"{name}_orig", new._parameters.get(name))
        value = getattr(old, name)
        if into is not None and isinstance(value, Tensor):
            with torch.no_grad():
                into.copy_(value)
                if self._world_size > 1 and self._resample_parameters:
                    into.copy_(broadcast(into.detach()))

    @staticmethod
    def _pruned(part: nn.Module, name: str) -> tuple[int, int]:
        mask = getattr(part, f"{name}_mask", None)
        if mask is None:
            parameter = getattr(part, name, None)
            return 0, parameter.numel() if isinstance(parameter, Tensor) else 1
        return int((mask == 0).sum()), mask.numel()

    def _log_sparsity(self, before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]], amount: float) -> None:
        def share(zeros: int, total: int) -> str:
            return f"{zeros}/{total} ({zeros / total:.2%})"

        total = sum(size for _, size in now)
        zeros = [sum(count for count, _ in counts) for counts in (before, now)]
        name = self._pruning_method_name
        log.info("Applied `%s`. Pruned: %s -> %s", name, share(zeros[0], total), share(zeros[1], total))
        for (part, parameter), (old, _), (new, size) in zip(self._parameters_to_prune, before, now, strict=True):
            if self._verbose == 2:
                log.info(
                    "Applied `%s` to `%r.%s` with amount=%s. Pruned: %d (%s) -> %d (%s)",
                    *(name, part, parameter, amount, old, f"{old / size:.2%}", new, f"{new / size:.2%}"),
                )

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Replace `weight_orig` and `weight_mask` by a plain `weight`, in a module and all its submodules."""
        for part in module.modules():
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, torch_prune.BasePruningMethod):
                    hook.remove(part)
                    del part._forward_pre_hooks[key]

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not trainer.strategy.whole_parameters:
            raise SettingError(
                f"ModelPruning needs whole parameters, and strategy={trainer.strategy.name!r} cuts them up, which "
                "torch.nn.utils.prune does not know. Use strategy='ddp' or one device; or prune the module after "
                "training, where it is whole.",
                field="strategy",
                got=trainer.strategy.name,
            )
        places = self.sanitize_parameters_to_prune(module, self._given, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(places)
        mine = {(id(part), name) for part, name in self._parameters_to_prune}
        for other in trainer.callbacks[: trainer.callbacks.index(self)]:
            if isinstance(other, ModelPruning) and not mine.isdisjoint(
                (id(part), name) for part, name in other._parameters_to_prune
            ):
                raise SettingError(
                    "two ModelPruning callbacks prune the same parameters, and neither would know the other's masks. "
                    "Leave one of them out, or give each its own by parameters_to_prune.",
                    field="parameters_to_prune",
                )
        self._world_size, self._rank = trainer.world_size, trainer.global_rank
        self._masks, self._first, self._original_layers = {}, {}, None

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Copy the initial weights, and apply a checkpoint's masks before the optimizer's state is loaded."""
        self._module_names = {id(part): clean_name(name) for name, part in module.named_modules()}
        if self._use_lottery_ticket_hypothesis is not False:
            self._original_layers = {}
            for index, (part, name) in enumerate(self._parameters_to_prune):
                layer = self._original_layers.get(id(part))
                if layer is None:
                    layer = self._original_layers[id(part)] = {"data": _plain_copy(part), "names": []}
                layer["names"].append((index, name))
                first = self._first.get(self._name_of(part, name))
                if first is not None:
                    getattr(layer["data"], name).data.copy_(first)
        for part, name in self._parameters_to_prune:
            mask = self._masks.get(self._name_of(part, name))
            if mask is not None and not hasattr(part, f"{name}_mask"):
                parameter = part._parameters[name]
                assert parameter is not None
                torch_prune.custom_from_mask(part, name, mask.to(parameter))
        self._masks, self._first = {}, {}

    def _name_of(self, part: nn.Module, name: str) -> str:
        prefix = self._module_names[id(part)]
        return f"{prefix}.{name}" if prefix else name

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._prune_on_train_epoch_end and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._run_pruning(trainer.current_epoch)

    def _run_pruning(self, epoch: int) -> None:
        prune, amount, reset = self._apply_pruning, self.amount, self._use_lottery_ticket_hypothesis
        amount = amount(epoch) if callable(amount) else amount
        if (prune(epoch) if callable(prune) else prune) and amount:
            self.apply_pruning(amount)
            if reset(epoch) if callable(reset) else reset:
                self.apply_lottery_ticket_hypothesis()

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Leave plain weights in the module, but only after the last save, which needs the names with `_orig`."""
        if self._make_pruning_permanent:
            self.make_pruning_permanent(module)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        if not self._module_names:
            return {}
        masks = {
            self._name_of(part, name): getattr(part, f"{name}_mask").bool()
            for part, name in self._parameters_to_prune
            if hasattr(part, f"{name}_mask")
        }
        first = {
            self._name_of(self._parameters_to_prune[index][0], name): getattr(layer["data"], name).detach()
            for layer in (self._original_layers or {}).values()
            for index, name in layer["names"]
        }
        return {"masks": masks, "first": first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._masks, self._first = state_dict["masks"], state_dict["first"]

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if self._make_pruning_permanent:
            checkpoint["state_dict"] = dict(_without_masks(checkpoint["state_dict"]))

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Convert the loaded weights to the module's form: plain weights, or `weight_orig` and `weight_mask`."""
        own = {clean_name(name) for name in module.state_dict()}
        # Fit applies the masks later, so it must load the values that the masks hide, and not zeros in their place.
        applied = trainer.state.fn != "fit"
        state = checkpoint["state_dict"]
        if any(_is_masked(name, state) and name.removesuffix("_mask") in own for name in state):
            state = dict(_without_masks(state, own, applied))
        for name in [name for name in own - state.keys() if name.endswith("_mask")]:
            plain = name.removesuffix("_mask")
            if plain in state:  # the module has masks, but the loaded weights are plain
                value = state.pop(plain)
                value = value if isinstance(value, Tensor) else value.read()
                state[f"{plain}_orig"] = value
                state[name] = self._masks.get(plain, torch.ones(value.shape)).to(value.dtype)
        checkpoint["state_dict"] = state


def _is_masked(name: str, state: Mapping[str, Any]) -> bool:
    return name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in state


def _without_masks(
    state: Mapping[str, Any], names: set[str] | None = None, applied: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a state dict with a plain `weight` in place of `weight_orig` and `weight_mask`.

    Args:
        state: the state dict; values are tensors, or tensors of a checkpoint that are read when needed.
        names: names of the weights to convert. None: all.
        applied: True: the plain weight is zero where the mask is zero. False: the plain weight is `weight_orig`.
    """
    masked = {name.removesuffix("_mask") for name in state if _is_masked(name, state)}
    masked = masked if names is None else {name for name in masked if clean_name(name) in names}
    parts = {f"{name}{end}" for name in masked for end in ("_orig", "_mask")}
    for name, value in state.items():
        plain = name.removesuffix("_orig")
        if name not in parts:
            yield name, value
        elif name.endswith("_orig") and not applied:
            yield plain, value
        elif name.endswith("_orig"):
            weight, mask = (one if isinstance(one, Tensor) else one.read() for one in (value, state[f"{plain}_mask"]))
            yield plain, (weight * mask.to(weight)).detach()


def _refresh(part: nn.Module) -> None:
    """Compute a module's `weight` from `weight_orig` and `weight_mask`, which torch does only in the next forward."""
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, torch_prune.BasePruningMethod):
            name = str(hook._tensor_name)
            if isinstance(hook, torch_prune.PruningContainer):
                # torch keeps every pruning, some with a mask of full size, and uses only the last one
                hook._pruning_methods = hook._pruning_methods[-1:]
            with torch.no_grad():
                setattr(part, name, hook.apply_mask(part))


def _plain_copy(part: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU with plain weights in place of masked ones."""
    hidden = {
        name: part.__dict__.pop(name)  # removed during the copy, since deepcopy refuses a tensor with a graph
        for name in [key.removesuffix("_orig") for key in part._parameters if key.endswith("_orig")]
        if name in part.__dict__
    }
    try:
        copied = deepcopy(part).cpu()
    finally:
        part.__dict__.update(hidden)
    _refresh(copied)
    for key, hook in list(copied._forward_pre_hooks.items()):
        if isinstance(hook, torch_prune.BasePruningMethod):
            hook.remove(copied)
            del copied._forward_pre_hooks[key]
    return copied
