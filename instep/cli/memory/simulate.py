"""Simulate two training steps under a strategy, on tensors without values, and count the bytes.

Strategies of one process and of FSDP run unchanged, in a fake process group. DDP's own code needs real tensors, so the
bytes of its buckets are added to a simulation of one process.
"""

from __future__ import annotations

import gc
import logging
import os
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

import instep
from instep.cli.memory.subject import Subject
from instep.errors import HookError, InstepError, SettingError, UsageError
from instep.state import PartialState
from instep.strategies import Precision, Strategy, resolve_strategy
from instep.strategies.fsdp import FSDPStrategy
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import configure

_CPU = torch.device("cpu")
_INPUT = "Give the batch that it needs by --input SIZES[:DTYPE] for each tensor, or by --data."
_STEPS = 2  # two, since the first step makes the optimizer's state

_OTHERS = (
    *(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (torch, instep)),
    sysconfig.get_path("stdlib"),
    "<",
)
_VALUES_ASKED_FOR = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def users_code(what: str, advice: str, batch: Any = None) -> Iterator[None]:
    """Run code of the user in the `with` block; replace its error by a UsageError with the place and some advice.

    Args:
        what: what the code does, such as "making train:Model".
        advice: what the user can do about an error.
        batch: the batch that the code works on, if any.

    Raises:
        UsageError: the code raised an error. instep's own errors pass unchanged, and so do errors of a step that asks
            for a tensor's value.
    """
    # Silence the logger that prints torch's traceback of a step that cannot be simulated.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except (InstepError, *_VALUES_ASKED_FOR):
        raise
    except Exception as error:
        frames = [call for call in traceback.extract_tb(error.__traceback__) if not call.filename.startswith(_OTHERS)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        on = "" if batch is None else f" on a batch of {tree_map_only(Tensor, _shape, batch)}"
        raise UsageError(f"{what} failed{on}: {type(error).__name__}: {error}{where}. {advice}") from error
    finally:
        log.disabled = was_off


class _Text(str):
    __repr__ = str.__str__


def _shape(tensor: Tensor) -> str:
    return _Text(f"{'x'.join(map(str, tensor.shape))}:{str(tensor.dtype).removeprefix('torch.')}")


class Bytes(TorchDispatchMode):
    """Counter of the bytes of all tensors that are made in the `with` block and still alive, and of their maximum.

    It counts the results of operators, and follows the resizing of storages, by which FSDP frees gathered weights. It
    does not count the memory that an operator needs while it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._aside = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count tensors that are made in the `with` block."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor runs the operator itself, and calls this again with local tensors
        result = func(*args, **(kwargs or {}))
        for leaf in () if self._aside else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._gone, key)
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@dataclass(frozen=True)
class Setup:
    """Strategy, precision and number of processes for which the memory is estimated.

    Args:
        strategy: name of the strategy.
        precision: name of the precision.
        devices: number of processes.
        accumulate: number of batches per optimizer step.
        on_gpu: whether training is on a GPU: the module is built in the host's memory, and the optimizer works on many
            tensors at a time.
    """

    strategy: str
    precision: str
    devices: int = 1
    accumulate: int = 1
    on_gpu: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes that one process needs.

    Args:
        weights: parameters and buffers, between steps.
        gradients: gradients after a backward pass; with DDP also the buckets in which they are all-reduced.
        optimizer: the optimizer's state, and weights that it keeps in another precision.
        activations: what a forward pass keeps for its backward pass; with FSDP also the weights that stay gathered.
            None if no step is simulated.
        peak: the most bytes at one time, from the construction of the module to the end of the second step. It is more
            than the sum of the others if a backward pass or the optimizer needs temporary memory.
        largest: number of elements of the largest parameter.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    peak: int
    largest: int = 0


def process_counts(strategy: str, counts: Sequence[int]) -> Sequence[int]:
    """Choose the numbers of processes for which a strategy is estimated: only 1 for a single device."""
    return [1] if strategy == "single_device" else counts


def simulate(subject: Subject, setup: Setup) -> Estimate:
    """Train two steps on tensors that have shapes but no values, and count the bytes that one process needs.

    Raises:
        SettingError: the strategy cannot be simulated, or does not work with this number of processes.
        UsageError: the step asks for a tensor's value, as `.item()` does.
    """
    ddp = setup.strategy.startswith("ddp")
    strategy = Strategy() if ddp else resolve_strategy(setup.strategy, setup.devices)
    kinds = {Strategy, FSDPStrategy, *([_mesh_strategy()] if hasattr(strategy, "sizes") else [])}
    if type(strategy) not in kinds or any(getattr(strategy, "sizes", {}).get(dim, 1) > 1 for dim in ("cp", "pp")):
        raise SettingError(
            f"the memory of strategy={setup.strategy!r} is not estimated: ddp, fsdp, hsdp, tp, deepspeed_stage_<n> and "
            "single_device are",
            field="strategy",
            got=setup.strategy,
        )
    # The state is made before there is a fake process group, so that this process counts as a single one.
    PartialState(cpu=True)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # these warnings are for the real training, which will show them
        Strategy.connect(strategy, _CPU, Precision(setup.precision, _CPU))
        if isinstance(strategy, FSDPStrategy):
            stack.enter_context(_group(setup.devices))
            copies = 2 if strategy.dp_replicate == "auto" else int(strategy.dp_replicate)
            strategy._world = dist.group.WORLD
            strategy.mesh = strategy.make_mesh({"dp_replicate": copies, "dp_shard": setup.devices // copies})
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_converting())
        count = stack.enter_context(Bytes())
        if isinstance(strategy, FSDPStrategy):
            stack.enter_context(_shapes_aside(count))
        try:
            return _train(subject, setup, strategy, count, ddp)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UsageError(
                f"a step of {subject.name} asks for a tensor's value ({error.func}: .item(), an if over a tensor, a "
                "mask as index ...), and here tensors have none. Leave the step out with --weights-only."
            ) from error


def _train(subject: Subject, setup: Setup, strategy: Strategy, count: Bytes, ddp: bool) -> Estimate:
    with users_code(f"making {subject.name}", "Give its arguments by --args."):
        module = subject.make()
    largest = max((p.numel() for p in module.parameters()), default=0)
    _attach(module)
    strategy.prepare_module(module)
    gc.collect()
    weights = count.now
    if setup.on_gpu:
        count.peak = weights
    optimizer = _optimizer(subject, module, setup.on_gpu)
    strategy.prepare_training(module, [optimizer])
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    buckets = [torch.empty_like(p) for p in trained] if ddp else []
    step = strategy.step_function("training_step")
    batch = None if subject.batch is None else subject.batch()
    convert = strategy.precision.input_converter()
    batch = batch if convert is None else convert(batch)
    fixed = count.now
    state = grads = left = 0
    for _ in range(_STEPS):
        for p in trained if batch is None else ():
            p.grad = torch.zeros_like(p)
        for micro in range(0 if batch is None else setup.accumulate):
            last = micro == setup.accumulate - 1
            with nullcontext() if last else strategy.no_sync():
                with strategy.precision.context() or nullcontext():
                    with users_code(f"a step of {subject.name}", _INPUT, batch):
                        output = step(batch, 0)
                    loss = _loss_of(output, subject)
                    del output
                if micro == 0:
                    left = count.now - fixed - state - grads
                    # The gradients of the step before are dropped between forward and backward, as in the Trainer.
                    optimizer.zero_grad()
                strategy.backward(loss)
                del loss
        grads = count.now - fixed - state
        strategy.gradients.step(optimizer)
        state = count.now - fixed - grads
    grads += sum(bucket.untyped_storage().nbytes() for bucket in buckets)
    return Estimate(weights, grads, state, None if batch is None else left, count.peak, largest)


def _attach(module: nn.Module) -> None:
    """Give a TrainModule a stand-in for the Trainer, with what a step and `configure_optimizers` may read from it.

    Raises:
        UsageError: the module optimizes by hand.
    """
    if getattr(module, "automatic_optimization", True) is False:
        raise UsageError(
            f"{type(module).__name__} optimizes by hand, which needs a Trainer. Leave the step out with "
            "--weights-only --optimizer NAME."
        )
    if isinstance(module, TrainModule):
        asked = {"estimated_stepping_batches": 1000, "num_training_batches": 1000, "max_epochs": 1, "max_steps": 1000}
        state = {"current_epoch": 0, "global_step": 0, "global_rank": 0, "world_size": 1, "is_global_zero": True}
        stand_in: Any = SimpleNamespace(**asked, **state, training=True)
        module._log_into([])
        module.trainer = stand_in


def _optimizer(subject: Subject, module: nn.Module, on_gpu: bool) -> Optimizer:
    if subject.optimizer is not None:
        optimizer = subject.optimizer([p for p in module.parameters() if p.requires_grad])
    else:
        found = configure(module.configure_optimizers(), module).optimizers  # pyright: ignore[reportCallIssue]
        if not found:
            raise HookError(f"{subject.name} has no optimizer. Name one with --optimizer.")
        optimizer = found[0]
    for group in optimizer.param_groups:
        if on_gpu and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _loss_of(output: Any, subject: Subject) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise HookError(f"{subject.name}.training_step returned {type(output).__name__}, not a loss")
    return loss


@contextmanager
def _patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Replace a function of torch in the `with` block."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _converting() -> Iterator[None]:
    """Make `Module.to` change parameters in place; torch would replace parameters that have no values."""

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None:
                tensor.data = fn(tensor.data)
        return self

    with _patched(nn.Module, "_apply", apply):
        yield


@contextmanager
def _shapes_aside(count: Bytes) -> Iterator[None]:
    """Do not count the full-size tensors that DTensor makes only to find the shapes of results."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # imported late, since it is slow

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with count.aside():
            return original(*args, **kwargs)

    with _patched(ShardingPropagator, name, propagate):
        yield


def _mesh_strategy() -> type[Strategy]:
    from instep.strategies.mesh import MeshStrategy  # imported late, since few runs use tensor parallelism

    return MeshStrategy


@contextmanager
def _group(size: int) -> Iterator[None]:
    """Make a process group of `size` ranks, of which only this process exists."""
    # Imported late, since it takes half a second. Older versions of torch need fake_collectives, which gives the
    # results of simulated collectives their sizes.
    import torch.distributed._tools.fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
