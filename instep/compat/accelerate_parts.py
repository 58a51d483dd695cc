"""Accelerate's classes and functions, made from instep's; `import` searches Accelerate's names here first."""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from packaging.version import parse
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

import instep.accelerator as ours
from instep import state as ours_state
from instep.accelerator.loader import AcceleratedLoader
from instep.accelerator.preparing import PreparedRun
from instep.accelerator.resuming import RestoredPlace
from instep.accelerator.unwrapping import without_compile
from instep.accelerator.wrappers import AcceleratedScheduler
from instep.big_models import set_module_tensor_to_device as set_tensor
from instep.compat.accelerate_saving import Attendance, save_alone, take_name
from instep.compat.adapting import adapt
from instep.compat.door import silently
from instep.compat.fsdp import KINDS, FullyShardedDataParallelPlugin
from instep.distributed import broadcast_object
from instep.distributed.out_of_memory import is_out_of_memory
from instep.distributed.rank_zero import on_rank_zero
from instep.state import AcceleratorState as _AcceleratorState
from instep.state import GradientState as _GradientState
from instep.state import PartialState as _PartialState
from instep.state import process
from instep.state.runs import active_run, clear_runs
from instep.types import ReadOnly
from instep.utils.warn import warn_user


class _Shared(type):
    """Metaclass with Accelerate's class attribute `_shared_state`, which is empty until the state is initialized."""

    forgotten = False

    @property
    def _shared_state(cls) -> dict[str, Any]:
        return {} if _Shared.forgotten or not process.is_held() else {"held": True}


def _reset(reset_partial_state: bool = False) -> None:
    """End the active runs. The state of the process is kept, since a process has one rank for its whole life."""
    clear_runs()
    _Shared.forgotten = _Shared.forgotten or reset_partial_state


class PartialState(_PartialState, metaclass=_Shared):
    """State of the process; constructing it a second time changes nothing."""

    __slots__ = ()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        given = {name: value for name, value in kwargs.items() if name in ("backend", "timeout") and value is not None}
        super().__init__(**({} if process.is_held() else {"cpu": cpu or None, **given}))
        _Shared.forgotten = False

    _reset_state = staticmethod(functools.partial(_reset, True))


class AcceleratorState(_AcceleratorState, metaclass=_Shared):
    """State of the process and of the active Accelerator, with its plugins."""

    __slots__ = ()

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu=None if process.is_held() else cpu or None)

    _reset_state = staticmethod(_reset)
    fsdp_plugin: ReadOnly[FullyShardedDataParallelPlugin | None] = ReadOnly(
        lambda _: _fsdp_plugin(), "The plugin by which the models are sharded; None."
    )

    @property
    def distributed_type(self) -> Any:
        """Kind of distributed training; `DistributedType.FSDP` if the models are sharded."""
        return super().distributed_type if self.fsdp_plugin is None else ours_state.DistributedType.FSDP


def _fsdp_plugin() -> FullyShardedDataParallelPlugin | None:
    plugin = getattr(active_run(), "plugin", None)
    return plugin if isinstance(plugin, FullyShardedDataParallelPlugin) else None


class GradientState(_GradientState):
    """State of gradient accumulation; a program that counts micro-batches itself calls `_set_sync_gradients`."""

    __slots__ = ()

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        pass

    plugin_kwargs: ReadOnly[dict[str, Any]] = ReadOnly(
        lambda s: {name: getattr(s, name) for name in ("num_steps", "adjust_scheduler", "sync_with_dataloader")},
        "Settings of the accumulation.",
    )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        run = active_run()
        if run is not None:
            run.gradient.sync_gradients = sync_gradients


class _DrawnOrder(RandomSampler):
    """Sampler whose random order is drawn as in torch, or computed from a seed and the epoch.

    Args:
        sampler: the loader's own sampler.
        common: generator that draws all orders: the sampler's own, or one that all ranks share. None: each order gets
            a new generator, seeded by `seed` and the epoch, or else by the process's random numbers.
        seed: number that determines each order together with the epoch; None: the order is drawn.
    """

    def __init__(self, sampler: RandomSampler, common: torch.Generator | None, seed: int | None) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)
        self._common, self._seed = common, seed
        self.drawn: dict[str, Any] = {"place": None, "state": None}
        """Epoch and cycle whose order was drawn last, and the generator's state before this order was drawn."""

    def _instep_order_of(self, epoch: int, cycle: int) -> Sequence[int]:
        """Return the order of an epoch, which is drawn when it is first used."""
        return _Order(self, [epoch, cycle])

    def draw(self, place: list[int]) -> list[int]:
        """Draw the order of an epoch, or return the order that was drawn for it before."""
        if self.drawn["place"] != place:
            seed = None if self._seed is None else self._seed + sum(place)
            generator = self._common or torch.Generator().manual_seed(_random_seed() if seed is None else seed)
            self.drawn = {"place": place, "state": generator.get_state()}
        self.generator = self._common or torch.Generator()
        self.generator.set_state(self.drawn["state"])
        return list(RandomSampler.__iter__(self))


class _Order(Sequence[int]):
    """An order of samples. It is drawn when an index is first read, as in torch; its length is known before that."""

    def __init__(self, sampler: _DrawnOrder, place: list[int]) -> None:
        self._sampler, self._place = sampler, place

    @functools.cached_property
    def _items(self) -> list[int]:
        return self._sampler.draw(self._place)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __repr__(self) -> str:  # all indices, since ranks compare the `repr` of their orders
        return repr(self._items)


class _Loader(AcceleratedLoader):
    """A prepared loader that draws as many random numbers as torch's loader, so that dropout is the same afterwards."""

    attendance: Attendance

    def passes_from(self, batches: int | None) -> Iterator[Any]:
        """Yield the batches of one pass over the data, and count each batch before it is fetched."""
        self.attendance.advance()
        with closing(super().passes_from(batches)) as passing:  # pyright: ignore[reportArgumentType]  a generator
            for batch in passing:
                yield batch
                self.attendance.advance()

    def _begin(self, batches: int | None) -> RestoredPlace | None:
        place = super()._begin(batches)
        if not self.source.first_batch and getattr(self.source.loader, "generator", None) is None:
            _random_seed()  # torch draws a seed for a loader's workers even if it has no workers
        return place


class _Prepared(PreparedRun):
    """The prepared objects, with the names and sample orders that programs of Accelerate expect.

    Its state dict holds the sample orders that were drawn.

    Without a given name, a model is named after its class, and a loader after the class of its dataset. The second
    object with the same name gets the number 2, as in `Net_2`, and so on.
    """

    loader_config: DataLoaderConfiguration
    register: Callable[..., None]

    def _forget(self) -> None:
        super()._forget()
        self.orders: list[_DrawnOrder] = []

    def prepare_model(self, model: nn.Module, place: bool | None, evaluates: bool, name: str | None) -> nn.Module:
        """Prepare a model; without a name, it gets the name of its class."""
        name = name or _free(type(without_compile(model)).__name__, self.models)
        return super().prepare_model(model, place, evaluates, name)

    def prepare_data_loader(self, loader: Any, place: bool | None, name: str | None) -> AcceleratedLoader:
        """Prepare a loader, with the sample order that torch would draw."""
        self._keep_order(loader)
        kind = type(getattr(loader, "dataset", None)).__name__
        name = name or _free(kind, [known.name for known in self.dataloaders])
        return super().prepare_data_loader(loader, place, name)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler that makes, per optimizer step, as many steps as there are processes.

        With `split_batches` it makes one step.
        """
        prepared = super().prepare_scheduler(scheduler)
        prepared.repeats = 1 if self.loader_config.split_batches else self.world_size
        return prepared

    def _keep_order(self, loader: Any) -> None:
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, BatchSampler) or type(batches).__iter__ is not BatchSampler.__iter__:
            return
        sampler = batches.sampler
        if type(sampler) is not RandomSampler:
            return
        # sentence-transformers has subclasses with further attributes; the loader needs a plain BatchSampler
        if type(batches) is not BatchSampler:
            batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
            vars(loader)["batch_sampler"] = batches
        seed, common = None, sampler.generator
        if self.loader_config.use_seedable_sampler:
            seed, common = self.loader_config.data_seed, None
            seed = torch.initial_seed() if seed is None else seed
        elif common is None and self.world_size > 1:
            common = torch.Generator().manual_seed(broadcast_object(_random_seed()))
        batches.sampler = drawn = _DrawnOrder(sampler, common, seed)
        if seed is None:  # only a drawn order must be saved; with a seed, a resumed run computes the same order
            if not self.orders:
                self.register(orders_of_the_data=self)
            self.orders.append(drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the sample orders that were drawn, so that a resumed epoch keeps its order."""
        return {"orders": [order.drawn for order in self.orders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sample orders that were drawn."""
        for order, drawn in zip(self.orders, state["orders"], strict=True):
            order.drawn = drawn


def _random_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


class DataLoaderConfiguration(ours.DataLoaderConfiguration):
    """Settings of data loaders, which can be changed until an Accelerator is made with them."""

    __setattr__ = object.__setattr__

    def __init__(
        self,
        split_batches: bool = False,
        dispatch_batches: bool | None = None,
        even_batches: bool = True,
        use_seedable_sampler: bool = False,
        data_seed: int | None = None,
        non_blocking: bool = False,
        use_stateful_dataloader: bool = False,
        custom_classes: Any = None,
        **options: Any,
    ) -> None:
        asked = split_batches, dispatch_batches, even_batches, data_seed, non_blocking, use_stateful_dataloader
        super().__init__(*asked, **options)
        self.use_seedable_sampler, self.custom_classes = use_seedable_sampler, custom_classes


class TorchDynamoPlugin(ours.TorchDynamoPlugin):
    """Settings of `torch.compile`; an option that is None counts as not given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{name: value for name, value in options.items() if value is not None})


_Accelerator: Any = adapt(ours.Accelerator, __name__, "_Accelerator", "Accelerator", silently)


class Accelerator(_Accelerator):
    """instep's Accelerator with Accelerate's arguments and attributes.

    At each optimizer step a scheduler steps as many times as there are processes, since scripts of Accelerate expect
    this; with `split_batches` it steps once.
    """

    _prepared_type = _Prepared

    def __init__(
        self,
        *,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        rng_types: Any = None,
        kwargs_handlers: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if fsdp_plugin is not None:
            kwargs["strategy"] = fsdp_plugin
        if "gradient_accumulation_plugin" in kwargs:
            kwargs.pop("gradient_accumulation_steps", None)
        asked = dataloader_config or DataLoaderConfiguration()
        left = [name for name in rng_types or () if str(getattr(name, "value", name)) != "generator"]
        if left or asked.custom_classes is not None:
            warn_user(
                "rng_types beyond 'generator' and custom_classes have no effect: each rank draws numbers of its own"
            )
        # Scripts of peft pass a ProjectConfiguration as `project_dir`.
        if isinstance(kwargs.get("project_dir"), ours.ProjectConfiguration):
            kwargs["project_config"] = kwargs.pop("project_dir")
        vars(asked).update(split_batches=kwargs.pop("split_batches", asked.split_batches))
        _Shared.forgotten = False
        super().__init__(
            cpu=None if process.is_held() else cpu or None,
            dataloader_config=asked,
            kwargs_handlers=[handler for handler in kwargs_handlers or () if handler is not None],
            **kwargs,
        )
        self._attendance = Attendance()
        self._prepared.register = self.register_for_checkpointing
        self._prepared.loader_type = type("_Loader", (_Loader,), {"attendance": self._attendance})

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save a state in exactly the folder `output_dir`, where programs look for it; replace an older state.

        If only the main process calls this method, it waits until the other processes have gone on without calling it,
        and saves alone.
        """
        if output_dir is None or "://" in str(output_dir):
            return super().save_state(output_dir, safe_serialization)
        named = Path(os.path.abspath(output_dir))
        if not self._attendance.all_come():
            return take_name(save_alone(self._states, named), named) if self.is_main_process else named
        saved = Path(super().save_state(output_dir, safe_serialization))
        return on_rank_zero(lambda: take_name(saved, named), f"renaming {saved}")

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Add objects to the saved states, each under the name of its class, with a number if that name is taken."""
        for one in objects:
            named[_free(type(one).__name__, {*self._states.registered, *named})] = one
        super().register_for_checkpointing(**named)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values from all ranks, without the samples that were repeated to fill the last batch."""
        if use_gather_object and isinstance(input_data, torch.Tensor):
            return input_data if self.num_processes == 1 else super().gather_for_metrics(list(input_data), True)
        return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get the same number of samples; a change applies to loaders that are prepared later."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    use_seedable_sampler: ReadOnly[bool] = ReadOnly(
        lambda a: a.dataloader_config.use_seedable_sampler, "Whether random orders depend on seed and epoch only."
    )
    state: ReadOnly[AcceleratorState] = ReadOnly(lambda a: AcceleratorState(), "State of the process and of this run.")
    gradient_state: ReadOnly[GradientState] = ReadOnly(lambda a: GradientState(), "Where the loop stands.")
    distributed_type: ReadOnly[Any] = ReadOnly(lambda a: a.state.distributed_type, "Kind of the processes, or FSDP.")
    is_fsdp2: ReadOnly[bool] = ReadOnly(lambda a: _fsdp_plugin() is not None, "Whether the models are sharded.")
    _models: ReadOnly[list[nn.Module]] = ReadOnly(lambda a: list(a._prepared.models.values()))
    _optimizers, _schedulers = _Accelerator.optimizers, _Accelerator.schedulers
    _dataloaders = _Accelerator.dataloaders

    def maybe_context_parallel(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing, since `instep.strategies.MeshStrategy(cp=)` splits sequences."""
        return nullcontext()


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that all ranks call, so that each rank counts the call before it starts."""

    @functools.wraps(method)
    def call(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        self._attendance.advance()
        return method(self, *args, **kwargs)

    return call


for _name in ("backward", "gather", "gather_for_metrics", "reduce", "wait_for_everyone", "end_training"):
    setattr(Accelerator, _name, _counted(getattr(Accelerator, _name)))


def _free(name: str, taken: Container[Any]) -> str:
    """Return `name` if it is not in `taken`; else the first of name_2, name_3 ... that is not in it."""
    return next(one for one in chain([name], (f"{name}_{number}" for number in count(2))) if one not in taken)


# ---- small functions and values


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[], int] | None = None
) -> Any:
    """Call a function again each time that memory runs out, with nine tenths of the batch size.

    If `reduce_batch_size_fn` is given, it is called without arguments, and returns the next batch size.
    """
    smaller = reduce_batch_size_fn
    return ours.find_executable_batch_size(
        function, starting_batch_size, (lambda size: int(size * 0.9)) if smaller is None else lambda size: smaller()
    )


def is_peft_model(model: nn.Module) -> bool:
    """Return True if a model has peft's adapters; a model in a strategy's wrapper is unwrapped first."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(ours.extract_model_from_parallel(model), peft.PeftModel)


def set_module_tensor_to_device(
    *args: Any, non_blocking: bool = False, clear_cache: bool = True, **kwargs: Any
) -> None:
    """Set a parameter or buffer on a device; `non_blocking` and `clear_cache` have no effect."""
    set_tensor(*args, **kwargs)


def check_cuda_p2p_ib_support() -> bool:
    """Return True, since NCCL itself checks whether it can use peer-to-peer and InfiniBand connections."""
    return True


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of an installed package, or a given version, with another version."""
    found = library_or_version
    version = parse(importlib.metadata.version(found)) if isinstance(found, str) else found
    return STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another version."""
    return compare_versions(parse(torch.__version__), operation, version)


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set environment variables, with names in capitals, in the `with` block."""
    given = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ[name] for name in given if name in os.environ}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(before)


should_reduce_batch_size = is_out_of_memory
STR_OPERATION_TO_FUNC = {"<": operator.lt, "<=": operator.le, "==": operator.eq}
STR_OPERATION_TO_FUNC |= {"!=": operator.ne, ">=": operator.ge, ">": operator.gt}
FSDP_SHARDING_STRATEGY = list(KINDS)
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
WEIGHTS_NAME, WEIGHTS_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
MODEL_NAME, SAFE_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME = "pytorch_model", "model", "optimizer", "scheduler"
