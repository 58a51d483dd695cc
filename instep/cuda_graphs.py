"""`CapturedStep` and `CapturedOptimizer`: record the kernels of a training step once as CUDA graphs, and replay them.

`Trainer(cuda_graphs=True)` uses this module. A replay launches all kernels of forward, loss and backward by one call,
and another replay those of the optimizer's step. So a step of many small kernels does not wait for the CPU. The Python
code of the step runs only while it is recorded. A step that a replay cannot repeat exactly runs the normal way, and the
reason is logged.
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
# number of first steps that run the normal way, as torch recommends: libraries and optimizers allocate memory in them
WARM_UP = 3
_MOST = 3  # limit for the number of recordings; more of them would take more time than the replays save
_PLAIN = (type(None), bool, int, float, str)


class NotCapturable(Exception):
    """Raised when a step cannot be recorded; the message is the reason."""


class Recorder(Protocol):
    """Protocol of an object that warms up and records a step on a device."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function as preparation for recording it later, and return its result."""
        ...

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Record a function; return its results, whose memory each replay fills, and a function that replays it."""
        ...


class CudaRecorder:
    """Recorder for a CUDA device.

    Args:
        device: device on which the step runs.

    Source: torch's notes on CUDA graphs, "whole-network capture".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        # graphs of failed recordings; they must stay alive, since torch's pool of pinned memory may refer to them
        self._abandoned: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function on the stream for recordings, after earlier and before later work of the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = run()
        current.wait_stream(self._side)
        return result

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], Any]]:
        """Record a function; its results are in the graph's own memory, which each replay overwrites."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # frees cached memory, which the graph's own pool cannot use
        with torch.cuda.stream(self._side):
            # In a stricter mode the recording would fail if a thread of a loader pins memory at the same time.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        return result, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """Reset torch's random generator and memory allocator after a failed recording.

        torch does not reset them itself. Without a reset, the generator would refuse to draw numbers, and the allocator
        would keep all memory that several streams have used.
        """
        with suppress(RuntimeError):  # an error here would hide the error of the recording, which says more
            graph.capture_end()
        graph.reset()
        self._abandoned.append(graph)
        with suppress(RuntimeError):  # raised if `capture_end` succeeded, since it has already made these calls
            torch._C._cuda_endAllocateToPool(self._side.device_index, pool)
            torch._C._cuda_releasePool(self._side.device_index, pool)
        empty = torch.cuda.CUDAGraph()
        # an empty recording makes the random generator forget the failed recording
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self._device)
        empty.capture_end()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for a device; None if the device has no CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CapturedStep:
    """Forward, loss and backward of a batch, recorded once and replayed for each batch with the same shapes.

    Args:
        module: module that is trained.
        training_step: function that takes the batch and its index, and returns the result of the user's method.
        logged: list to which `self.log` appends `(name, value, ...)`.
        recorder: recorder for the module's device.
        device: device of the module.

    Attributes:
        replayed: whether the step for the last batch was a replay.
        recorder: recorder for the module's device.
        optimizer: the recorded step of the optimizer; None if it is not recorded.
    """

    def __init__(
        self,
        module: nn.Module,
        training_step: Callable[..., Any],
        logged: list[Any],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.replayed = False  # after a replay (True), the gradients are in the memory of the recording
        self.optimizer: CapturedOptimizer | None = None
        self._module, self._training_step, self._logged = module, training_step, logged
        self.recorder, self._device = recorder, device
        self._given_up = self._warned = False
        self._left, self._captures = WARM_UP, 0
        self._replay: Callable[[], Any] | None = None

    def __call__(self, batch: Any, batch_idx: int, plain: Callable[..., Any]) -> Any:
        """Compute the gradients for a batch and store them in `grad` of the parameters.

        Args:
            batch: the batch: tensors on the device, in nested containers.
            batch_idx: index of the batch.
            plain: function that computes the gradients in the normal way, and returns its output without autograd
                graph.

        Returns:
            The result of `training_step`, without autograd graph.
        """
        self.replayed = False
        if self._given_up:
            return plain(batch, batch_idx)
        if self._left:
            self._left -= 1
            return self.recorder.warm_up(lambda: plain(batch, batch_idx))
        if self._replay is not None and self._state() != self._captured_state:
            self._replay = None  # weights or modes of modules were changed after the recording
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
        # cloned, since the next replay writes into the same memory, and a callback or logger may keep these tensors
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
                    p.grad = None  # the backward then writes new gradients, and does not add to old ones
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
        """Return what a recording depends on: addresses of parameters and buffers, `requires_grad`, and modes."""
        module = self._module
        return (
            [(p.data_ptr(), p.requires_grad) for p in module.parameters()],
            [buffer.data_ptr() for buffer in module.buffers()],
            [each.training for each in module.modules()],
        )

    def _misfit(self, batch: Any) -> str:
        """Return why the recording does not fit a batch: a difference in what `_shapes` returns; "" if it fits."""
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
    """Step of an optimizer, recorded once and replayed after each replayed backward.

    Args:
        optimizer: optimizer for which `why_not_captured` returns "".
        step: recorded step that computes the gradients.
    """

    def __init__(self, optimizer: Optimizer, step: CapturedStep) -> None:
        self._optimizer, self._step = optimizer, step
        self._plain, self._given_up, self._captures = optimizer.step, False, 0
        self._replay: Callable[[], Any] | None = None

    def __call__(self) -> None:
        """Make a step of the optimizer, by a replay if possible."""
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
        """Return the optimizer's settings, which must not change after a recording; for a tensor, its address."""
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
    """Return why the step of an optimizer cannot be recorded; "" if it can be recorded.

    Args:
        optimizer: optimizer of the run.
        scheduled: whether a scheduler changes the settings of the optimizer.

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
    """Return the text of a warning that the step of an optimizer is not recorded."""
    return f"cuda_graphs: the step of {type(optimizer).__name__} runs the normal way, since {why}."


def _shapes(batch: Any, device: torch.device) -> dict[str, Any]:
    """Describe a batch: path of each leaf -> shape, strides and dtype of a tensor, or the value of another leaf."""
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
    """Return the output of a step, with all tensors detached.

    An autograd graph that is alive while a step is recorded would bring the stream on which it was made into the
    recording; if that is the default stream, the recording fails.
    """
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message; if an earlier error led to it, of that error's message."""
    if isinstance(error.__context__, RuntimeError | NotCapturable):
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
