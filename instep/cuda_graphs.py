"""CUDA graphs of a training step: `Trainer(cuda_graphs=True)` records a step's kernels once and replays them.

A replay launches all kernels of forward, loss and backward at once, and those of the optimizer's step at once. So a
step of many small kernels no longer waits for the host. The step's Python code runs once, while the step is recorded. A
step with anything that a replay cannot repeat exactly runs the normal way, and the reason is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed.nested import iter_leaves, map_leaves
from instep.utils.rank_zero import rank_zero_info
from instep.utils.warn import warn_user

T = TypeVar("T")
# steps that first run the normal way, as torch recommends, since libraries and optimizers allocate in their first steps
WARM_UP = 3
_MOST = 3  # most recordings of one step: more of them cost more time than the replays save
_PLAIN = (type(None), bool, int, float, str)


class NotCapturable(Exception):
    """Reason why a step cannot be recorded."""


class Recorder(Protocol):
    """Protocol of an object that warms up and records a step on a device."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function that will be recorded later, and return its result."""
        ...

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Record a function without running it; return the place of its results, and the function that replays it."""
        ...


class CudaRecorder:
    """The recorder of a CUDA device.

    Args:
        device: where the step runs.

    Source: torch's notes on CUDA graphs, "whole-network capture".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        # torch's pool of pinned memory may still refer to these graphs
        self._abandoned: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run on a second stream, as a recording will; both streams wait for each other."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = run()
        current.wait_stream(self._side)
        return result

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Record; the results lie in the graph's own memory, which each replay overwrites."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # return cached memory that the graph may need
        with torch.cuda.stream(self._side):
            # Meanwhile threads of a loader pin memory. The stricter mode would treat that as an error of the step.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        return result, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """Reset what torch does not reset itself after a failed recording.

        Without this, torch's random generator would refuse to draw, and its allocator would keep all memory that
        several streams have used.

        Its random generator would refuse to draw, and its allocator keep all memory that several streams have used.
        """
        with suppress(RuntimeError):  # an error of this reset would hide the first error, which says more
            graph.capture_end()
        graph.reset()
        self._abandoned.append(graph)
        with suppress(RuntimeError):  # after a recording that succeeded, torch has already done this
            torch._C._cuda_endAllocateToPool(self._side.device_index, pool)
            torch._C._cuda_releasePool(self._side.device_index, pool)
        empty = torch.cuda.CUDAGraph()
        # An empty recording releases the random generator from the failed recording.
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self._device)
        empty.capture_end()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None where there are no CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CapturedStep:
    """Forward, loss and backward of a batch, recorded once and replayed for each batch of the same shapes.

    Args:
        module: what is trained.
        training_step: takes the batch and its index, and returns what the user's method does.
        logged: the list that `self.log` appends `(name, value, ...)` to.
        recorder: of the module's device.
        device: the module's.

    Attributes:
        replayed: whether the last batch was trained on by a replay.
        recorder: of the module's device.
        optimizer: the recorded step of the optimizer, where there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        training_step: Callable[..., Any],
        logged: list[Any],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.replayed = False  # True if the last batch was replayed; its gradients then lie in the recording's memory
        self.optimizer: CapturedOptimizer | None = None
        self._module, self._training_step, self._logged = module, training_step, logged
        self.recorder, self._device = recorder, device
        self._given_up = self._warned = False
        self._left, self._captures = WARM_UP, 0
        self._replay: Callable[[], Any] | None = None

    def __call__(self, batch: Any, batch_idx: int, plain: Callable[..., Any]) -> Any:
        """Train on a batch and leave its gradients in the parameters.

        Args:
            batch: tensors in nested containers, on the device.
            batch_idx: its number.
            plain: does the same the normal way, and returns nothing with a graph of autograd.

        Returns:
            What `training_step` returns, without a graph of autograd.
        """
        self.replayed = False
        if self._given_up:
            return plain(batch, batch_idx)
        if self._left:
            self._left -= 1
            return self.recorder.warm_up(lambda: plain(batch, batch_idx))
        if self._replay is not None and self._state() != self._captured_state:
            self._replay = None  # since the recording, weights were replaced, frozen or set to evaluation
        if self._replay is None and not self._capture(batch, batch_idx):
            return plain(batch, batch_idx)
        if (why := self._misfit(batch)) or self._replay is None:
            self._say(why)
            return plain(batch, batch_idx)
        tensors = [leaf for _, leaf in iter_leaves(batch) if isinstance(leaf, Tensor)]
        if tensors:
            torch._foreach_copy_(self._inputs, tensors, non_blocking=True)
        self._replay()
        self.replayed = True
        for p, gradient in self._gradients:
            if p.grad is not gradient:
                p.grad = gradient
        # Clone, since the next replay writes into the same memory, and a callback or the log may keep these tensors.
        self._logged.extend((name, value.clone(), *rest) for name, value, *rest in self._entries)
        return map_leaves(_copied, self._output)

    def _capture(self, batch: Any, batch_idx: int) -> bool:
        before = len(self._logged)
        try:
            if self._captures == _MOST:
                raise NotCapturable(f"the model was changed after each of {_MOST} recordings")
            self._captures += 1
            self._shapes = _shapes(batch, self._device)
            static = map_leaves(_copied, batch)
            self._inputs = [leaf for _, leaf in iter_leaves(static) if isinstance(leaf, Tensor)]
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            state = self._state()

            def run() -> tuple[Any, list[Any], list[Tensor | None]]:
                for p in parameters:
                    p.grad = None  # with `grad` None, the backward writes new gradients and does not add to old ones
                output = self._training_step(static, batch_idx)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise NotCapturable("training_step returned no loss that has gradients")
                loss.backward()
                return without_graph(output), self._logged[before:], [p.grad for p in parameters]

            (self._output, self._entries, gradients), self._replay = self.recorder.capture(run)
            self._check_entries()
        except (NotCapturable, RuntimeError) as error:
            self._replay, self._given_up = None, True
            self._say(f"{_reason(error)}; no step is recorded")
            return False
        finally:
            del self._logged[before:]
        self._gradients = [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]
        self._captured_state = state
        rank_zero_info("cuda_graphs: the step is recorded; from here on it is replayed.")
        return True

    def _check_entries(self) -> None:
        for name, value, *_ in self._entries:
            if not isinstance(value, Tensor) or value.device.type != self._device.type:
                raise NotCapturable(
                    f"self.log({name!r}, ...) got a {type(value).__name__} that a replay would not compute anew; log "
                    "it in a hook, or give a tensor on the device"
                )

    def _state(self) -> tuple[Any, ...]:
        """Return what a recording depends on: addresses of weights, which are trained, and the modules' modes."""
        module = self._module
        return (
            [(p.data_ptr(), p.requires_grad) for p in module.parameters()],
            [buffer.data_ptr() for buffer in module.buffers()],
            [each.training for each in module.modules()],
        )

    def _misfit(self, batch: Any) -> str:
        """Return how a batch differs from the recorded one; "" if it does not."""
        try:
            shapes = _shapes(batch, self._device)
        except NotCapturable as error:
            return str(error)
        if shapes == self._shapes:
            return ""
        for name, found in shapes.items():
            if found != self._shapes.get(name):
                return f"batch{name} is {found}, and was {self._shapes.get(name)} when the step was recorded"
        return "a batch has other parts than the one that was recorded"

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(f"cuda_graphs: this step runs without its graph, and so will others like it: {why}")


class CapturedOptimizer:
    """An optimizer's step, recorded once and replayed after each replayed backward.

    Args:
        optimizer: for which `why_not_captured` says nothing.
        step: what computes its gradients.
    """

    def __init__(self, optimizer: Optimizer, step: CapturedStep) -> None:
        self._optimizer, self._step = optimizer, step
        self._plain, self._given_up, self._captures = optimizer.step, False, 0
        self._replay: Callable[[], Any] | None = None

    def __call__(self) -> None:
        """Step."""
        if self._given_up or not self._step.replayed:
            self._plain()
            return
        current = self._replay is not None and self._state() == self._captured_state and self._same_places()
        if (current or self._capture()) and self._replay is not None:
            self._replay()
        else:
            self._plain()

    def _capture(self) -> bool:
        try:
            if self._captures == _MOST:
                raise NotCapturable(
                    f"its settings or gradients were changed after each of {_MOST} recordings. A learning rate that "
                    "changes needs capturable=True and lr=torch.tensor(..., device='cuda')"
                )
            self._captures += 1
            self._captured_state, self._places = self._state(), self._read_places()
            self._of = self._optimizer.state
            _, self._replay = self._step.recorder.capture(self._plain)
        except (NotCapturable, RuntimeError) as error:
            self._replay, self._given_up = None, True
            warn_user(runs_without(self._optimizer, _reason(error)))
            return False
        return True

    def _state(self) -> list[Any]:
        """Return the settings that a recording depends on; for a tensor, its address."""
        return [
            (name, value.data_ptr() if isinstance(value, Tensor) else value)
            for group in self._optimizer.param_groups
            for name, value in ((key, len(each) if key == "params" else each) for key, each in group.items())
        ]

    def _read_places(self) -> list[int]:
        return [
            0 if p.grad is None else p.grad.data_ptr()
            for group in self._optimizer.param_groups
            for p in group["params"]
        ]

    def _same_places(self) -> bool:
        return self._optimizer.state is self._of and self._read_places() == self._places


def why_not_captured(optimizer: Optimizer, scheduled: bool) -> str:
    """Return why an optimizer's step cannot be recorded; "" if it can.

    Args:
        optimizer: of the run.
        scheduled: whether a scheduler changes its settings.

    Example:
        >>> why_not_captured(torch.optim.Adam([torch.zeros(1)]), scheduled=False)
        'it needs capturable=True'
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return "it is not one of torch's own"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "hooks run around its step"
    for group in optimizer.param_groups:
        if group.get("capturable", True) is False:
            return "it needs capturable=True"
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.device.type == "cpu" != group["params"][0].device.type:
            return "its lr is a tensor on the CPU; make it one on the device"
        if scheduled and not (isinstance(rate, Tensor) and "capturable" in group):
            return (
                "a scheduler changes its lr: give lr=torch.tensor(..., device='cuda'), with Adam or another optimizer "
                "that has capturable=True"
            )
    return ""


def runs_without(optimizer: Optimizer, why: str) -> str:
    """Return the warning for an optimizer whose step is not recorded."""
    return f"cuda_graphs: the step of {type(optimizer).__name__} runs the normal way, since {why}."


def _shapes(batch: Any, device: torch.device) -> dict[str, Any]:
    """Return the properties that each leaf must keep from batch to batch, by its path."""
    found: dict[str, Any] = {}
    for name, leaf in iter_leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.device.type != device.type:
                raise NotCapturable(f"batch{name} is a tensor on {leaf.device}, not on {device}")
            found[name] = (tuple(leaf.shape), leaf.stride(), leaf.dtype)
        elif isinstance(leaf, _PLAIN):
            found[name] = leaf
        else:
            raise NotCapturable(f"batch{name} is a {type(leaf).__name__}, whose changes a replay would not see")
    return found


def without_graph(output: Any) -> Any:
    """Return a step's output, detached.

    Otherwise autograd's graph stays alive while a step is recorded. It would draw the stream on which it was made into
    the recording, and the default stream makes a recording fail.
    """
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _reason(error: Exception) -> str:
    """Return the first line of an error. For chained errors it is that of the step's own error."""
    if isinstance(error.__context__, RuntimeError | NotCapturable):
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
