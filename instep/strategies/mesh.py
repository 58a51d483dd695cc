"""`MeshStrategy`: several kinds of parallelism at the same time, each along its own dimension of a device mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.state import PartialState
from instep.strategies import tensor_parallel
from instep.strategies.context_parallel import ContextParallel, RingAttention
from instep.strategies.gradients import parameters_of
from instep.strategies.pipeline.strategy import Pipeline, PipelinedStrategy
from instep.utils.checks import Check, choice, is_int

_ATTENTION = {"all_to_all": ContextParallel, "ring": RingAttention}
_SIZE = Check(
    lambda value: is_int(value, 1) or value == -1, "a number of processes, from 1, or -1 for what is left", int
)


class MeshStrategy(PipelinedStrategy):
    """Tensor, context, pipeline and sharded data parallelism, in any combination.

    Ranks are ordered with `tp` as the innermost dimension, then `cp`, `dp_shard`, `dp_replicate` and `pp`, so that
    processes that communicate most are neighbors. Every size is a number of processes. One size may be -1, which means
    all processes that the other sizes leave.

    Args:
        dp_replicate: number of copies of the weights; each copy reads its own part of the data.
        dp_shard: number of processes that read their own parts of the data and shard the weights, as with FSDP.
        tp: number of processes that share each layer's computation, by the module's `parallelize(mesh)` or the plan of
            its transformers model.
        cp: number of processes that share each sequence. The module's `sequence_dim` says which dimension is split.
            Attention must call `F.scaled_dot_product_attention`. A model with position embeddings must call
            `sequence_positions`.
        pp: number of processes in a pipeline, each of which has some of the layers that the module's `pipeline_stages`
            lists. Batches are divided into micro-batches, and the loss is the module's `pipeline_loss`.
        pp_schedule: "1f1b"; "gpipe", which runs all forwards first; or "interleaved", which is 1F1B with several stages
            on each process.
        pp_microbatches: number of micro-batches per batch. None: two per process.
        pp_split: names of the parts of `pipeline_stages` with which the stages begin, except the first stage. Default:
            the split in which the largest stage has the fewest parameters.
        pp_stages_per_rank: number of stages on each process, for "interleaved".
        loss_parallel: whether to compute the cross-entropy without gathering the logits, if their classes are sharded
            over the tp processes (by a head with `ColwiseParallel(use_local_output=False)`).
        cp_attention: "all_to_all", which supports every attention but needs a number of heads that is a multiple of cp;
            or "ring", torch's ring attention, for any number of heads, but only on GPUs and without masks.
        **fsdp_options: further arguments of `FSDPStrategy`.

    Raises:
        SettingError: a size is not a number of processes, or several sizes are -1. (When training starts:) the product
            of the sizes is not the number of processes, or a dimension cannot be divided evenly.

    Example:
        >>> MeshStrategy(dp_shard=2, tp=2).name
        'mesh'
    """

    name = "mesh"

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        pp_schedule: str = "1f1b",
        pp_microbatches: int | None = None,
        pp_split: Sequence[str] = (),
        pp_stages_per_rank: int = 2,
        loss_parallel: bool = False,
        cp_attention: str = "all_to_all",
        **fsdp_options: Any,
    ) -> None:
        sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        self._wanted = {field: _SIZE(field, size) for field, size in sizes.items()}
        rest = [field for field, size in self._wanted.items() if size == -1]
        if len(rest) > 1:
            raise SettingError(
                f"{' and '.join(rest)} are all -1: only one can take what is left", field=rest[1], got=-1
            )
        choice(*_ATTENTION)("cp_attention", cp_attention)
        split = pp_split if isinstance(pp_split, str) else tuple(pp_split)  # a string is an error in the check below
        pipeline = Pipeline(pp_schedule, pp_microbatches, split, pp_stages_per_rank)
        for dim, options in (
            ("tp", {"loss_parallel": loss_parallel is not False}),
            ("cp", {"cp_attention": cp_attention != "all_to_all"}),
            (
                "pp",
                {f"pp_{option}": getattr(pipeline, option) != value for option, value in Pipeline()._asdict().items()},
            ),
        ):
            for option, given in options.items():
                if given and self._wanted[dim] == 1:
                    raise SettingError(f"{option} belongs to {dim}: leave it out, or set {dim} too", field=option)
        if loss_parallel and pp != 1:
            raise SettingError(
                "loss_parallel=True leaves the classes of logits spread over processes, and the output of a pipeline "
                "is a plain tensor: leave one of loss_parallel and pp out.",
                field="loss_parallel",
                got=True,
            )
        super().__init__(pipeline, dp_replicate=max(dp_replicate, 1), **fsdp_options)
        self.loss_parallel = loss_parallel
        self.cp_attention = cp_attention
        self._context: ContextParallel | None = None
        self._watched: set[Optimizer] = set()
        self._stack = ExitStack()

    # ---- set-up and tear-down

    def check_world_size(self, world_size: int) -> None:
        self.sizes = self._sizes(world_size)
        """Number of processes along each dimension of the mesh."""
        self.dp_replicate = self.sizes["dp_replicate"]
        if self.sizes["pp"] > 1:
            self.pipeline.microbatches_for(self.sizes["pp"])

    def _sizes(self, world_size: int) -> dict[str, int]:
        given = {field: size for field, size in self._wanted.items() if size != -1}
        product = math.prod(given.values())
        left, over = divmod(world_size, product)
        if over or (left > 1 and len(given) == len(self._wanted)):
            asked = ", ".join(f"{field}={size}" for field, size in self._wanted.items() if size != 1)
            fixed = len(given) == len(self._wanted)
            raise SettingError(
                f"MeshStrategy({asked or 'dp_shard=1'}) is for {'' if fixed else 'a multiple of '}{product} processes, "
                f"and this run has {world_size}. Start {product} (devices={product} on one node), or "
                f"{'let one size be -1 for what is left' if fixed else f'choose sizes that divide {world_size}'}.",
                field="strategy",
                got=world_size,
            )
        return {field: left if size == -1 else size for field, size in self._wanted.items()}

    def make_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """Make the device mesh for weights: `dp_shard` and all dimensions with more than one process. Collective.

        The processes of `cp`, which share a sequence, hold different shards of the weights, so in this mesh they are
        part of `dp_shard`.
        """
        own = self.sizes
        if own["cp"] > 1:
            others = PartialState().num_processes // own["cp"] // own["tp"]
            sequences = super().make_mesh({"others": others, "cp": own["cp"], "tp": own["tp"]})
            self._context = _ATTENTION[self.cp_attention](sequences["cp"])
        sizes = {**own, "dp_shard": own["dp_shard"] * own["cp"], "cp": 1}
        return super().make_mesh({dim: size for dim, size in sizes.items() if size > 1 or dim == "dp_shard"})

    def connect(self, device: torch.device, precision: Any) -> None:
        if self.cp_attention == "ring" and self.sizes["cp"] > 1 and device.type != "cuda":
            raise SettingError(
                f"cp_attention='ring' has no kernels on device {device}. Use cp_attention='all_to_all'.",
                field="cp_attention",
                got="ring",
            )
        for field in ("tp", "pp"):
            if precision.scaler is not None and self.sizes[field] > 1:
                # torch's GradScaler cannot handle a mix of plain and sharded gradients.
                raise SettingError(
                    f"precision={precision.name!r} scales gradients, and ranks of {field} hold different ones and "
                    "would not agree how. Use precision='bf16-mixed'.",
                    field="precision",
                    got=precision.name,
                )
        super().connect(device, precision)
        sizes = self.sizes
        self.data_world_size = sizes["dp_replicate"] * sizes["dp_shard"]
        self.data_rank = PartialState().process_index // (sizes["cp"] * sizes["tp"]) % self.data_world_size
        # Ranks along pp and tp have the same values, so one of them counts; ranks along cp have different values.
        self.contributes = all(self.mesh.get_local_rank(dim) == 0 for dim in ("pp", "tp") if sizes[dim] > 1)

    def prepare_module(self, module: nn.Module) -> None:
        if self._context is not None:
            if getattr(module, "sequence_dim", None) is None:
                raise HookError(
                    f"cp={self.sizes['cp']} cuts sequences, and {type(module).__name__} does not say where they are: "
                    "set its attribute sequence_dim to the dimension of the batch's tensors that is the sequence (1 "
                    "for (batch, length)), or to {key or index in the batch: dimension}."
                )
            if self.cp_attention == "all_to_all":
                tensor_parallel.check_heads(module, self.sizes["cp"] * self.sizes["tp"], "cp", key_heads=False)
        super().prepare_module(module)
        if self.sizes["tp"] > 1 or self.sizes["pp"] > 1:
            # FSDP warns that an output that is a view must not be changed in place. Layers under tensor parallelism and
            # pipeline stages may return views.
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        if self.loss_parallel:
            # Imported late: only needed with tensor parallelism.
            from torch.distributed.tensor.parallel import loss_parallel

            # `loss_parallel` sets global switches of torch, which the step and the backward need, so it stays on.
            self._stack.enter_context(loss_parallel())

    def parallelize(self, module: nn.Module) -> None:
        if self.sizes["tp"] > 1:
            self.share_weights(module)  # copy weights before the division, while every rank has all of them
            tensor_parallel.cut(module, self.mesh)

    def _fully_shard(self, module: nn.Module, root: bool, alone: bool) -> None:
        if self.dp_mesh.size() > 1 or self.mp_policy is not None or self.cpu_offload:
            super()._fully_shard(module, root, alone)

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().prepare_training(module, optimizers)
        for optimizer in optimizers:
            self._watch(optimizer)

    def rebind_optimizer(self, optimizer: Optimizer) -> None:
        super().rebind_optimizer(optimizer)
        self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        own = set(parameters_of(optimizer)).intersection(self.module.parameters())
        if self.sizes["tp"] > 1 and own and optimizer not in self._watched:
            self._watched.add(optimizer)
            tensor_parallel.BeforeStep(self.module, optimizer, self.mesh["tp"])

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        for field in ("cp", "pp"):
            if self.sizes[field] > 1:
                raise SettingError(
                    f"{field}={self.sizes[field]} needs the Trainer, whose steps it takes apart; a loop of your own "
                    "has tp, dp_shard and dp_replicate.",
                    field=field,
                    got=self.sizes[field],
                )
        return super().wrap(module, optimizers)

    def teardown(self) -> None:
        self._watched.clear()
        self._stack.close()
        super().teardown()

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        step = super().step_function(name)
        # predict_step gets whole sequences, since it may generate text.
        if self._context is not None and name != "predict_step":
            step = self._context.step(step, self.module.sequence_dim, everywhere=self.pipe_size == 1)  # type: ignore[arg-type]
        if self.sizes["tp"] == 1:
            return step
        return lambda *args: map_leaves(tensor_parallel.plain, step(*args))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._context is None:
            super().backward(loss, *args, **kwargs)
            return
        with self._context.attention():  # activation checkpointing recomputes attention in the backward
            super().backward(loss, *args, **kwargs)
