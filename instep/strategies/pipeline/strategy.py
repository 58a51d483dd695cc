"""Pipeline parallelism: the stages of a module run on different ranks, by `torch.distributed.pipelining`.

A module for a pipeline defines `TrainModule.pipeline_stages` and `TrainModule.pipeline_loss`. Its steps are the same
with and without a pipeline:

    def training_step(self, batch, batch_idx):
        loss = self.pipeline_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

Without a pipeline, `self(...)` is the forward and `pipeline_loss` computes the loss. In a pipeline, `self(...)` returns
a `Pending` object in training, and `pipeline_loss` of it runs forward and backward of all micro-batches; every rank
gets the loss of the whole batch. Outside of training `self(...)` returns the output of the last stage on every rank, so
evaluation and hooks work as usual.

The gradients are kept separately until the loop calls backward on that loss, because the loop zeroes gradients in
between. This needs memory for a second copy of the gradients. The micro-batches' losses are multiplied by the weight of
the batch (`Strategy.loss_weight`), because the schedule averages gradients over data-parallel ranks, whose batches have
different weights. If several stages share a weight (tied embeddings), its gradients are summed over the stages before
each optimizer step. Each rank steps its own copy, and a checkpoint holds the copy of the first of these ranks.
Checkpoints contain the whole module, without stages.

`MeshStrategy` is a subclass of `PipelinedStrategy`, which is the same as `FSDPStrategy` if the mesh has no dimension
`pp`. Three methods of `MeshStrategy` prepare a pipeline:

    __init__            passes a `Pipeline` to `PipelinedStrategy`
    check_world_size    calls `Pipeline.microbatches_for`
    make_mesh           makes a mesh with a dimension "pp"

Source: Huang et al., GPipe, 2019 (arXiv:1811.06965); Narayanan et al., 2021 (arXiv:2104.04473), for 1F1B and its
interleaved form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from instep.distributed.nested import map_leaves
from instep.errors import HookError, SettingError
from instep.strategies.clipping import clip_norm_, gradient_of, local_part
from instep.strategies.dtensors import gather_whole, parts_to_write
from instep.strategies.fsdp import FSDPGradients, FSDPStrategy
from instep.strategies.pipeline.runner import Micro, Pending, Ran, Runner, outline_of
from instep.strategies.pipeline.split import Cut
from instep.utils.checks import at_least, choice, wrong
from instep.utils.imports import check_torch
from instep.utils.optimizer_state import names_of

SCHEDULES = ("1f1b", "gpipe", "interleaved")


class Pipeline(NamedTuple):
    """Settings of a pipeline: schedule, micro-batches and stages.

    Args:
        schedule: "1f1b" keeps the activations of few micro-batches in memory; "gpipe" runs all forwards first;
            "interleaved" is 1F1B with several stages on each rank, which waits less but communicates more.
        microbatches: number of micro-batches per batch; with more of them, ranks wait less. None: two per rank.
        split: names of the parts of `pipeline_stages` with which the stages begin, except the first stage. Default: the
            split in which the largest stage has the fewest parameters.
        stages_per_rank: number of stages on each rank, for "interleaved".
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    split: Sequence[str] = ()
    stages_per_rank: int = 2

    def check(self) -> Pipeline:
        """Check the settings, and return this object.

        Raises:
            SettingError: a setting is wrong.
        """
        choice(*SCHEDULES)("pp_schedule", self.schedule)
        for field, value in (("pp_microbatches", self.microbatches), ("pp_stages_per_rank", self.stages_per_rank)):
            if value is not None:
                at_least(1)(field, value)
        if isinstance(self.split, str) or not all(isinstance(name, str) for name in self.split):
            raise wrong("pp_split", self.split, "a list of names of parts, such as ['blocks.2']")
        return self

    def microbatches_for(self, ranks: int) -> int:
        """Return the number of micro-batches per batch for a pipeline of `ranks` ranks.

        Raises:
            SettingError: the schedule does not support this number of micro-batches.
        """
        count = 2 * ranks if self.microbatches is None else self.microbatches
        if self.schedule == "1f1b" and count < ranks:
            expected = f"at least {ranks}, one for each rank, or pp_schedule='gpipe'"
        elif self.schedule == "interleaved" and count % ranks:
            expected = f"a multiple of {ranks}, the number of ranks"
        else:
            return count
        raise SettingError(
            f"pp_microbatches={count} with pp_schedule={self.schedule!r} must be {expected}.",
            field="pp_microbatches",
            got=count,
        )


class PipelinedGradients(FSDPGradients):
    """Gradients of a module in a pipeline; each rank has the gradients of its own stages."""

    def clip(
        self, parameters: Sequence[Tensor], value: float, algorithm: str = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        if self.strategy._runner is None or algorithm == "value":
            return super().clip(parameters, value, algorithm, norm_type)
        pipe = self.strategy.mesh["pp"].get_group()
        return clip_norm_(parameters, value, norm_type, groups=[pipe], skip=self.strategy._copies)


class PipelinedStrategy(FSDPStrategy):
    """FSDP for a module that may be divided into the stages of a pipeline.

    Args:
        pipeline: settings of the pipeline, used if the mesh has a dimension `pp`.
        **fsdp_options: arguments of `FSDPStrategy`.
    """

    gradients_class = PipelinedGradients

    def __init__(self, pipeline: Pipeline | None = None, **fsdp_options: Any) -> None:
        super().__init__(**fsdp_options)
        self.pipeline = (pipeline or Pipeline()).check()
        self._cut: Cut | None = None
        self._runner: Runner | None = None
        self._training = False
        self._syncs = True
        # Keys of the dict that `pipeline_loss` returns, and whether it returns a plain loss instead.
        self._returned: tuple[list[str], bool] | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    # ---- set-up and tear-down

    @property
    def pipe_size(self) -> int:
        """Number of ranks in the pipeline; 1 if there is none."""
        return self.mesh["pp"].size() if "pp" in (self.mesh.mesh_dim_names or ()) else 1

    @property
    def _rounds(self) -> int:
        """Number of stages on each rank."""
        return self.pipeline.stages_per_rank if self.pipeline.schedule == "interleaved" else 1

    def prepare_module(self, module: nn.Module) -> None:
        if self.pipe_size == 1:
            super().prepare_module(module)
            return
        cut: Cut | None = module.__dict__.get("_pipeline_cut")  # set if an earlier run has divided the module
        if cut is None:
            self._cut = None
            self._check_module(module)
            self.share_weights(module)  # copy rank 0's weights, since ranks may have different initial values
            super().prepare_module(module)
            cut = module.__dict__["_pipeline_cut"] = self._require_cut()
        elif (cut.ranks, len(cut.stages)) != (self.pipe_size, self._rounds):
            raise SettingError(
                f"this {type(module).__name__} was cut for a pipeline of {cut.ranks} ranks with {len(cut.stages)} "
                f"stages each by an earlier run, and this one has {self.pipe_size} with {self._rounds}. Make a new "
                "module; a checkpoint's weights fit it.",
                field="pp",
                got=self.pipe_size,
            )
        self.module, self._cut = module, cut
        self._sharded = [
            part for stage in cut.stages.values() for part in stage.modules() if isinstance(part, FSDPModule)
        ]
        self._reshard()
        self._start(cut)
        self._send_copies()

    def _require_cut(self) -> Cut:
        assert self._cut is not None
        return self._cut

    def _check_module(self, module: nn.Module) -> None:
        kind = type(module).__name__
        # Before torch 2.13, stages support neither frozen weights nor a change of the size of micro-batches.
        check_torch(2, 13, purpose="pp")
        if not getattr(module, "automatic_optimization", True):
            raise SettingError(
                f"{kind} optimizes manually, and in a pipeline the backward is run by its schedule. Set "
                "automatic_optimization = True, or use another strategy.",
                field="strategy",
                got=self.name,
            )
        for name in ("pipeline_stages", "pipeline_loss"):
            own = getattr(type(module), name, None)
            if own is None or own.__module__.startswith("instep.trainer"):
                raise HookError(
                    f"{kind} has no {name}, which a pipeline needs: pipeline_stages() lists the parts of forward in "
                    "their order, and pipeline_loss(output, target) computes the loss of what forward returned."
                )

    def shard(self, module: nn.Module) -> None:
        if self.pipe_size == 1:
            self.shard_part(module)
            return
        pipe = self.mesh["pp"]
        self._cut = Cut(module, pipe.size() * self._rounds, self.pipeline.split, pipe.get_local_rank(), pipe.size())
        for stage in self._cut.stages.values():
            if stage.loose_parameters and self.dp_mesh.size() > 1:
                raise SettingError(
                    f"{type(module).__name__} has parameters of its own, in no submodule, and FSDP cannot gather them "
                    "for a stage. Put each into a submodule, or use a pipeline without dp_shard and dp_replicate.",
                    field="dp_shard",
                    got=self.dp_mesh.size(),
                )
            self.shard_part(stage)

    def shard_part(self, module: nn.Module) -> None:
        """Shard a module, or a stage of a module, over `dp_mesh`."""
        super().shard(module)

    def share_weights(self, module: nn.Module) -> None:
        if self._cut is None:
            super().share_weights(module)
            return
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if isinstance(tensor, DTensor) or tensor.is_meta:
                    continue
                shared = tensor.detach().to(self.device)  # NCCL cannot send a tensor on the CPU
                for name in self.mesh.mesh_dim_names or ():
                    if name != "pp":
                        group = self.mesh.get_group(name)
                        dist.broadcast(shared, dist.get_global_rank(group, 0), group)
                tensor.copy_(shared)

    def _start(self, cut: Cut) -> None:
        pipe, module = self.mesh["pp"], self.module
        self._runner = Runner(
            self.pipeline.schedule,
            cut.stages,
            pipe.size() * self._rounds,
            self.pipeline.microbatches_for(pipe.size()),
            pipe.get_group(),
            self.device,
            alone=self.dp_mesh.size() == 1,
        )
        here = pipe.get_local_rank()
        # Record the sharded parameters, as the optimizer has them: gathered parameters are other objects.
        self._parameters = list(module.parameters())
        self._shared = cut.shared(module)
        self._copies = [p for p, ranks in self._shared if ranks[0] != here]
        self._returned = None
        module.forward = self._forward
        module.pipeline_loss = self._pipeline_loss  # type: ignore[assignment]

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().prepare_training(module, optimizers)
        if self._runner is not None and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise SettingError(
                "LBFGS looks at all parameters together, of which a stage of a pipeline has its own only. Use an "
                "optimizer that treats each parameter by itself, or another strategy.",
                field="strategy",
                got=self.name,
            )

    def teardown(self) -> None:
        super().teardown()
        if self._runner is not None:
            self._runner = None
            for name in ("forward", "pipeline_loss"):
                self.module.__dict__.pop(name, None)

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        step = super().step_function(name)
        if self._runner is None or name != "training_step":
            return step

        def train(*args: Any) -> Any:
            self._training = True
            try:
                return step(*args)
            finally:
                self._training = False

        return train

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        if named:
            raise HookError(
                f"self(..., {', '.join(f'{name}=' for name in named)}): the first stage of a pipeline takes its inputs "
                "by position. Leave the names out."
            )
        assert self._runner is not None
        return Pending(inputs) if self._training else self._runner.evaluate(inputs)

    def _pipeline_loss(self, output: Any, target: Any) -> Any:
        if not isinstance(output, Pending):
            return type(self.module).pipeline_loss(self.module, output, target)  # type: ignore[operator]
        assert self._runner is not None
        weight = self.loss_weight()
        parameters = [p for p in self._parameters if p.requires_grad]
        before = [p.grad for p in parameters]
        sums: dict[str, Tensor] = {}
        plain = True

        def loss_of(micro: Micro, output: Any, index: int) -> Tensor:
            nonlocal plain
            samples = micro.samples(index)
            share = (samples.stop - samples.start) / micro.batch
            part = map_leaves(lambda leaf: _samples(leaf, samples, micro.batch), target)
            result = type(self.module).pipeline_loss(self.module, output, part)  # type: ignore[operator]
            plain = not isinstance(result, Mapping)
            values = {"loss": result} if plain else result
            for name, value in values.items():
                value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
                sums[name] = sums.get(name, 0.0) + value.to(self.device) * share
            loss = values["loss"] * (weight * share)
            return loss if weight else loss.nan_to_num(0.0, 0.0, 0.0)

        for p in parameters:
            p.grad = None
        try:
            self._runner.train(output.inputs, loss_of)
            new = [p.grad for p in parameters]
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
        values, plain = self._everywhere(sums, plain)

        def accept(factor: Tensor) -> None:
            self._add_gradients(parameters, new, factor / weight if weight else None)

        loss = Ran.apply(self._anchor, values["loss"], accept)
        return loss if plain else {**values, "loss": loss}

    def _everywhere(self, sums: Mapping[str, Tensor], plain: bool) -> tuple[dict[str, Tensor], bool]:
        """Send the result of `pipeline_loss` from the rank of the last stage to every rank."""
        runner = self._runner
        assert runner is not None
        returned = self._returned
        if returned is None:
            returned = self._returned = runner.object_from_last((list(sums), plain))
        names, plain = returned
        if runner.last and list(sums) != names:
            raise HookError(f"pipeline_loss returned {list(sums)}, and before {names}; let it return the same always")
        dtype = torch.float64 if self.precision.dtype is torch.float64 else torch.float32
        packed = torch.empty(len(names), dtype=dtype, device=self.device)
        if runner.last:
            packed.copy_(torch.stack([sums[name].to(dtype) for name in names]))
        return dict(zip(names, runner.tensor_from_last(packed).unbind(), strict=True)), plain

    def _add_gradients(
        self, parameters: Sequence[nn.Parameter], new: Sequence[Tensor | None], factor: Tensor | None
    ) -> None:
        if factor is not None and factor.device.type == "cpu" and float(factor) == 1.0:
            # The factor is 1 unless training_step has multiplied its loss. On a GPU this is not checked, since it would
            # make the host wait.
            factor = None
        for p, gradient in zip(parameters, new, strict=True):
            if gradient is None:
                continue
            if factor is not None:
                # An offloaded gradient is on another device than the factor.
                local_part(gradient).mul_(factor.to(gradient.device))
            if p.grad is None:
                p.grad = gradient
            else:
                local_part(p.grad).add_(local_part(gradient))
        if self._syncs:
            self._sum_shared()

    def _send_copies(self) -> None:
        """Make copies of shared weights equal, since with `meta_init` each rank initializes its own copy."""
        here, group = self.mesh["pp"].get_local_rank(), self.mesh["pp"].get_group()
        for p, (first, *others) in self._shared:
            if here == first:
                for rank in others:
                    dist.send(local_part(p).detach(), group=group, group_dst=rank)
            else:
                dist.recv(local_part(p).detach(), group=group, group_src=first)

    def _sum_shared(self) -> None:
        """Sum the gradients of weights that several ranks of the pipeline share (tied embeddings)."""
        for p, ranks in self._shared:
            if not p.requires_grad:
                continue
            gradient = gradient_of(p)
            if gradient is None:
                gradient = p.grad = torch.zeros_like(p)
            mine, here = local_part(gradient), self.mesh["pp"].get_local_rank()
            parts = {rank: mine if rank == here else torch.empty_like(mine) for rank in ranks}
            self._exchange(mine, parts)
            mine.copy_(reduce(torch.add, [parts[rank] for rank in ranks]))

    def _exchange(self, mine: Tensor, parts: Mapping[int, Tensor]) -> None:
        group = self.mesh["pp"].get_group()
        peers = {dist.get_global_rank(group, rank): part for rank, part in parts.items() if part is not mine}
        sends = [dist.P2POp(dist.isend, mine, peer, group) for peer in peers]
        receives = [dist.P2POp(dist.irecv, part, peer, group) for peer, part in peers.items()]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()

    def no_sync(self) -> AbstractContextManager[Any]:
        return super().no_sync() if self._runner is None else self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        # Skip only the sum over shared weights; the schedule reduces over data-parallel ranks for each batch.
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    # ---- state

    def model_state(self) -> dict[str, Any]:
        state = super().model_state()
        return state if self._cut is None else self._cut.saved_here(state)

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        return super().model_shapes() if self._cut is None else self._cut.shapes

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        if self._cut is not None:
            state = self._cut.loaded_here(state, self.module.state_dict(), strict)
        return super().load_model_state(state, strict)

    def average_replicas(self) -> None:
        if self._cut is None:  # each rank has the whole model; the stages of a pipeline have different buffers
            super().average_replicas()

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        state = super().model_state_from(held)
        return state if self._cut is None else self._cut.saved_here(state)

    def full_model_state(self) -> dict[str, Any]:
        if self._cut is None:
            return super().full_model_state()
        state = {name: gather_whole(value) for name, value in self.model_state().items()}
        if not self._first_of_stage:
            return {}
        group = self.mesh["pp"].get_group()
        here = dist.get_rank(group)
        if here:
            outlines = {
                name: outline_of(value) if isinstance(value, Tensor) else value for name, value in state.items()
            }
            dist.send_object_list([outlines], group=group, group_dst=0, device=self.device)
            for value in state.values():
                if isinstance(value, Tensor):
                    dist.send(value.to(self.device).contiguous(), group=group, group_dst=0)
            return {}
        whole = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
        for rank in range(1, dist.get_world_size(group)):
            box: list[Any] = [None]
            dist.recv_object_list(box, group=group, group_src=rank, device=self.device)
            for name, value in box[0].items():
                if isinstance(value, Tensor):
                    value = torch.empty_like(value, device=self.device)
                    dist.recv(value, group=group, group_src=rank)
                    value = value.cpu()
                whole[name] = value
        return {name: whole[name] for name in self._cut.shapes}

    @property
    def _first_of_stage(self) -> bool:
        return all(self.mesh.get_local_rank(name) == 0 for name in self.mesh.mesh_dim_names or () if name != "pp")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        tree = super().optimizer_state(optimizer)
        return tree if self._cut is None else self._cut.optimizer_saved_here(tree)

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        if self._cut is not None:
            self._reshard()
            tree = self._cut.optimizer_loaded_here(tree, names_of(self.module, [optimizer]).values())
        return super().load_optimizer_state(optimizer, tree, strict)

    def local_shards(self, tree: Any) -> Any:
        return (
            super().local_shards(tree) if self._cut is None else parts_to_write(tree, self._first_of_stage, self.mesh)
        )


def _samples(leaf: Any, samples: slice, batch: int) -> Any:
    """Return a slice of the samples of a tensor that has one row per sample; return any other value unchanged."""
    return leaf[samples] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == batch else leaf
