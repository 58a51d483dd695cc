"""`Runner`: runs micro-batches through the stages of a pipeline, by `torch.distributed.pipelining`.

Every batch is divided into the same number of micro-batches, since with sharded weights every rank must run the same
number of forwards. torch's stages require a fixed size of micro-batches, which is that of the largest batch so far. A
smaller batch is padded with copies of its last sample. The outputs of these copies are removed before the loss, so that
the copies have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from instep.distributed.nested import tensor_leaves, with_tensors
from instep.errors import DataError, HookError, UsageError
from instep.state.messages import hand_out
from instep.strategies.pipeline.split import Stage


class Pending:
    """Object that `self(...)` returns in a pipeline's training step in place of the output, for `pipeline_loss`."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._misuse(f".{name}")

    def __getitem__(self, key: Any) -> Any:
        raise self._misuse(f"[{key!r}]")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise cls._misuse(f" in {getattr(func, '__name__', func)}")

    @staticmethod
    def _misuse(how: str) -> UsageError:
        return UsageError(
            f"training_step uses the output of self(...){how}, which it does not have in a pipeline, where "
            "micro-batches go forward and backward by turns. Compute the loss as self.pipeline_loss(self(inputs), "
            "target), and what else is made of the output there too: it may return a dict with the loss under 'loss'."
        )


class Ran(torch.autograd.Function):
    """Autograd function for a loss whose gradients the pipeline has computed already.

    Its backward computes nothing: it passes `grad_output`, a factor for the computed gradients, to `accept`.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, accept: Callable[[Tensor], None]) -> Tensor:
        ctx.accept = accept
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, None, None]:
        ctx.accept(factors[0])
        return None, None, None


class Micro(NamedTuple):
    """A batch that is divided into micro-batches of equal size.

    Args:
        size: number of samples in each micro-batch.
        batch: number of samples in the batch, without padding.
        inputs: inputs of all micro-batches together, with padding.
    """

    size: int
    batch: int
    inputs: tuple[Any, ...]

    def samples(self, index: int) -> slice:
        """Return the slice of the batch for a micro-batch; it is empty if the micro-batch has only padding."""
        return slice(min(index * self.size, self.batch), min((index + 1) * self.size, self.batch))


class _AutocastOff(PipelineStage):
    """A stage whose backward runs outside of autocast, as in a step without a pipeline."""

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, enabled=False):
            return super().backward_one_chunk(*args, **kwargs)


class Runner:
    """Run batches through the stages of a pipeline.

    Args:
        kind: schedule: "gpipe", "1f1b" or "interleaved".
        stages: stages of this rank, by index.
        count: number of stages in the pipeline.
        microbatches: number of micro-batches per batch.
        group: process group of the pipeline; stage s is on rank s modulo the size of the group.
        device: device of this rank.
        alone: whether this is the only pipeline, so that data parallelism neither shards nor copies the weights.
    """

    def __init__(
        self,
        kind: str,
        stages: Mapping[int, Stage],
        count: int,
        microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        alone: bool,
    ) -> None:
        self.kind, self.stages, self.count, self.microbatches = kind, stages, count, microbatches
        self.group, self.device, self.alone = group, device, alone
        self.first, self.last = 0 in stages, count - 1 in stages
        self._last_rank = dist.get_global_rank(group, (count - 1) % dist.get_world_size(group))
        # For each kind of inputs (see `_kind_of`), in training and in evaluation: the size of micro-batches, and the
        # schedule of torch.
        self._schedules: dict[Any, tuple[int, Any]] = {}
        # For each kind of inputs: the inputs of each stage, as tensors on the meta device.
        self._outlines: dict[Any, list[tuple[Tensor, ...]]] = {}
        self._used: set[bool] = set()
        self._outputs: dict[Any, Any] = {}
        self._loss: Callable[[Any, int], Tensor] | None = None

    # ---- training

    def train(self, inputs: tuple[Any, ...], loss: Callable[[Micro, Any, int], Tensor]) -> None:
        """Run forward and backward over all micro-batches, and add the gradients to those of the parameters.

        Args:
            inputs: inputs of the first stage for the whole batch.
            loss: function that returns the loss of a micro-batch. It is called with the batch, the output of the last
                stage for the micro-batch (without padding) and the index of the micro-batch.
        """
        micro, schedule = self._prepared(inputs, trains=True)
        self._loss = lambda output, index: self._loss_of(micro, output, index, loss)
        index = torch.arange(self.microbatches)
        try:
            schedule.step(
                *(micro.inputs if self.first else ()), target=index if self.last else None, return_outputs=False
            )
        finally:
            self._loss = None

    def _call_loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, int(index))

    def _loss_of(self, micro: Micro, output: Any, index: int, loss: Callable[..., Tensor]) -> Tensor:
        tensors: tuple[Tensor, ...] = output if isinstance(output, tuple) else (output,)
        samples = micro.samples(index)
        real = samples.stop - samples.start
        if not real:
            return (
                sum((tensor.sum() for tensor in tensors if tensor.requires_grad), torch.zeros((), device=self.device))
                * 0.0
            )
        if real < micro.size:
            tensors = tuple(tensor[: len(tensor) // micro.size * real] for tensor in tensors)
        return loss(micro, with_tensors(self.stages[self.count - 1].output_outline, tensors), index)

    # ---- evaluation

    def evaluate(self, inputs: tuple[Any, ...]) -> Any:
        """Run a batch through the pipeline; return the last stage's output on every rank. Collective."""
        with torch.no_grad():
            micro, schedule = self._prepared(inputs, trains=False)
            output = schedule.step(*(micro.inputs if self.first else ()))
        tensors: tuple[Tensor, ...] = ()
        if self.last:
            whole = micro.size * self.microbatches
            tensors = tuple(
                tensor[: len(tensor) // whole * micro.batch].contiguous()
                for tensor in (output if isinstance(output, tuple) else (output,))
            )
        key = (_kind_of(inputs), micro.batch)
        if key not in self._outputs:
            outline = None
            if self.last:
                outline = with_tensors(self.stages[self.count - 1].output_outline, map(outline_of, tensors))
            self._outputs[key] = self.object_from_last(outline)
        outline = self._outputs[key]
        if not self.last:
            leaves = tensor_leaves(outline, "the output of a pipeline")
            tensors = tuple(torch.empty_like(tensor, device=self.device) for _, tensor in leaves)
        return with_tensors(outline, map(self.tensor_from_last, tensors))

    def object_from_last(self, value: Any) -> Any:
        """Send an object from the rank of the last stage to every rank of the pipeline. Collective."""
        return hand_out(value, self._last_rank, self.group, "broadcasting the last stage's object", self.device)

    def tensor_from_last(self, tensor: Tensor) -> Tensor:
        """Send a tensor from the last stage's rank to all ranks, which pass a tensor to receive into. Collective."""
        dist.broadcast(tensor, self._last_rank, self.group)
        return tensor

    # ---- schedules

    def _prepared(self, inputs: tuple[Any, ...], trains: bool) -> tuple[Micro, Any]:
        """Divide a batch into micro-batches; return them and torch's schedule to run them."""
        sizes = {len(value) for value in inputs if isinstance(value, Tensor) and value.ndim}
        if len(sizes) != 1 or 0 in sizes:
            raise HookError(
                f"the inputs of a pipeline, self(...), must be tensors whose first dimension is the batch; got sizes "
                f"{sorted(sizes)}"
            )
        batch = sizes.pop()
        size = -(-batch // self.microbatches)
        kind = _kind_of(inputs)
        key = (kind, trains, torch.is_inference_mode_enabled())
        known = self._schedules.get(key)
        if known is None or known[0] < size:
            known = self._schedules[key] = (size, self._make(inputs, kind, size, trains))
        size, schedule = known
        missing = size * self.microbatches - batch
        if missing and self.first:
            inputs = tuple(
                torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]) if isinstance(value, Tensor) else value
                for value in inputs
            )
        return Micro(size, batch, inputs), schedule

    def _make(self, inputs: tuple[Any, ...], kind: Any, size: int, trains: bool) -> Any:
        if kind not in self._outlines:
            # If several pipelines share sharded weights, each forward in `_find_outlines` gathers weights from the
            # other pipelines, which must run the same forward at this moment. This is certain only at the first batch
            # of training and of evaluation.
            if self._outlines and not self.alone and trains in self._used:
                raise DataError(
                    f"batches of a pipeline whose weights are sharded must keep their shape, but for the number of "
                    f"samples; got {kind} after {', '.join(map(str, self._outlines))}. Pad all batches to one length."
                )
            self._outlines[kind] = self._find_outlines(inputs)
        self._used.add(trains)
        outlines = [
            tuple(
                torch.empty(len(tensor) * size, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
                for tensor in tensors
            )
            for tensors in self._outlines[kind]
        ]
        for tensors in outlines[1:]:
            for tensor in tensors:
                tensor.requires_grad_(trains and tensor.dtype.is_floating_point)
        stages: list[Any] = [
            _AutocastOff(
                stage,
                index,
                self.count,
                self.device,
                input_args=outlines[index],
                # The last stage sends its output to no other stage, so any outline will do for it.
                output_args=outlines[index + 1] if index + 1 < self.count else outlines[index],
                group=self.group,
            )
            for index, stage in self.stages.items()
        ]
        # With scale_grads=True torch would divide existing gradients, even in an evaluation.
        options: dict[str, Any] = {"n_microbatches": self.microbatches, "scale_grads": False}
        if trains:
            options["loss_fn"] = self._call_loss
        if self.kind == "interleaved":
            return (ScheduleInterleaved1F1B if trains else ScheduleLoopedBFS)(stages, **options)
        return (Schedule1F1B if trains and self.kind == "1f1b" else ScheduleGPipe)(stages[0], **options)

    def _find_outlines(self, inputs: tuple[Any, ...]) -> list[tuple[Tensor, ...]]:
        """Find shapes and dtypes of each stage's inputs for one sample by running all stages in turn. Collective."""
        current = tuple(value[:1] if isinstance(value, Tensor) else value for value in inputs)
        found: list[tuple[Tensor, ...]] = []
        ranks = dist.get_world_size(self.group)
        for index in range(self.count):
            found.append(tuple(outline_of(tensor) for tensor in current if isinstance(tensor, Tensor)))
            if index == self.count - 1:
                break
            source = dist.get_global_rank(self.group, index % ranks)
            outputs = _evaluated(self.stages[index], current) if index in self.stages else ()
            mine = tuple(map(outline_of, outputs))
            told = hand_out(mine, source, self.group, "broadcasting a stage's outline", self.device)
            current = tuple(
                outputs[i].contiguous() if outputs else torch.empty_like(tensor, device=self.device)
                for i, tensor in enumerate(told)
            )
            for tensor in current:
                dist.broadcast(tensor, source, self.group)
        return found


def _evaluated(stage: Stage, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run a stage in eval mode, so that it draws no random numbers and changes no buffers; then restore the modes."""
    training = [part for part in stage.modules() if part.training]
    stage.eval()
    try:
        with torch.no_grad():
            return stage(*inputs)
    finally:
        for part in training:
            part.training = True


def outline_of(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device, so without values, with the shape and dtype of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _kind_of(inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the key of inputs for schedules and outlines: their dtypes, and shapes without the number of samples."""
    return tuple(
        (tuple(value.shape[1:]), value.dtype) if isinstance(value, Tensor) else type(value) for value in inputs
    )
