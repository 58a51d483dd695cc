"""Optimizers that need whole matrices, such as Muon, for weights that are sharded over ranks.

Each matrix has an owner among the ranks that share it. A step sends the parts of weights and gradients to the owners,
one bucket of matrices at a time. The owner steps the optimizer over whole, plain tensors, and sends the parts of the
new weights back. This takes two collectives for each bucket. While the owners step one bucket, the next bucket is sent.
The arithmetic is the optimizer's own, so the result is the same as in one process, and bit-identical if the gradients
are.

Between two steps, the owner of a matrix holds the whole optimizer state of the matrix. `state_dict` divides this state
in the same way as the weight. So a checkpoint looks like a checkpoint of any optimizer, and other strategies and
numbers of ranks can load it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from instep.errors import SettingError
from instep.strategies.dtensors import box_of, with_local

BUCKET_BYTES = 64 * 2**20  # bytes of whole weights in a bucket; a larger matrix has a bucket of its own
_AHEAD = 2  # number of buckets that are sent to their owners at the same time

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a part of a tensor, and the index at which it begins in each dimension."""


@dataclass
class _Place:
    """Where the parts of a matrix are: the ranks that share it, this rank's index among them, and each part's box."""

    group: Any
    rank: int
    boxes: list[Box]

    def __post_init__(self) -> None:
        self.sizes = [math.prod(shape) for shape, _ in self.boxes]
        self.slices = [tuple(slice(b, b + n) for n, b in zip(shape, begin, strict=True)) for shape, begin in self.boxes]


_places = WeakTensorKeyDictionary()  # maps each parameter to its `_Place`


@dataclass
class _Matrix:
    """A matrix in a step: its parameter, parameter group, the place of its parts, and the rank that owns it."""

    parameter: DTensor
    group: int
    place: _Place
    owner: int

    @property
    def is_mine(self) -> bool:
        return self.owner == self.place.rank


class WholeMatrix(Optimizer):
    """Optimizer wrapper that sees whole matrices if ranks share weights: FSDP, HSDP, tensor parallelism, or several.

    `WholeMatrix(optimizer)` returns the same object; its class then derives from both this class and the optimizer's
    class. In one process and under DDP, the optimizer steps as before. Under sharding, `torch.optim.Muon` alone takes
    about 13 collectives for each matrix, and its result depends on the number of ranks. With this wrapper it takes two
    collectives for 64 MB of matrices, and its result is the same as in one process.

    The optimizer's `step` is called once for each bucket, with only this bucket's parameters in its groups. So an
    optimizer may keep state for each parameter, in `optimizer.state`, but no state that all parameters share. If ranks
    share weights, all ranks must call `state_dict`.

    Args:
        optimizer: optimizer over parameters of any shape; they may be sharded before or after this call.

    Raises:
        SettingError: `optimizer` is already wrapped, or is not an optimizer.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> muon = WholeMatrix(torch.optim.Muon([layer.weight], lr=0.02))
        >>> isinstance(muon, torch.optim.Muon), isinstance(muon, WholeMatrix)
        (True, True)

    Source:
        Jordan et al.: Muon, 2024 (https://kellerjordan.github.io/posts/muon/); owners of matrices as in Liu et al.:
        Muon is Scalable for LLM Training, 2025 (https://arxiv.org/abs/2502.16982).
    """

    def __new__(cls, optimizer: Optimizer | None = None) -> Any:
        if optimizer is None:  # copy and pickle call this without an argument
            return super().__new__(cls)
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, WholeMatrix):
            raise SettingError(
                f"WholeMatrix wraps a torch optimizer once, and got a {type(optimizer).__name__}. Give it the "
                "optimizer itself, such as WholeMatrix(torch.optim.Muon(matrices))",
                field="optimizer",
                got=optimizer,
            )
        optimizer.__class__ = _whole_class(type(optimizer))
        optimizer._patch_step_function()
        return optimizer

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        """Do nothing, since `__new__` has made the optimizer."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters.

        If ranks share weights, all of them must call this, with gradients for the same parameters.

        Args:
            closure: function that evaluates the model again and returns the loss.

        Returns:
            Result of the closure; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plain, buckets = self._parts_of_a_step()
        if plain:
            self._step_on(plain)
        under_way: deque[_Gather] = deque()
        sent: list[_Scatter] = []
        for bucket, follows in zip(buckets, [*buckets[_AHEAD:], *[None] * _AHEAD], strict=False):
            if not under_way:
                under_way.extend(_Gather(first, self.state) for first in buckets[:_AHEAD])
            whole = under_way.popleft().finish(self.state)
            if follows is not None:
                under_way.append(_Gather(follows, self.state))
            self._step_on([(matrix.group, whole[matrix.parameter]) for matrix in bucket if matrix.is_mine])
            for parameter, tensor in whole.items():
                self.state[parameter] = self.state.pop(tensor, {})
            sent.append(_Scatter(bucket, whole))
        for scatter in sent:
            for parameter, local in scatter.finish():
                parameter.to_local().copy_(local)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, divided as the weights are; if ranks share weights, all ranks must call this."""
        before, buckets = self.state, self._parts_of_a_step(all_of_them=True)[1]
        cut = dict(pair for bucket in buckets for pair in _cut(bucket, before))
        rest = {parameter: values for parameter, values in before.items() if parameter not in cut}
        self.state = defaultdict(dict, rest | {parameter: values for parameter, values in cut.items() if values})
        try:
            return super().state_dict()
        finally:
            self.state = before

    def _parts_of_a_step(self, all_of_them: bool = False) -> tuple[list[tuple[int, Tensor]], list[list[_Matrix]]]:
        """Return the parameters with gradients: those that this rank has whole, and all others in buckets.

        Each of the whole ones comes with the index of its parameter group.

        Args:
            all_of_them: whether to return parameters without gradients too.
        """
        plain: list[tuple[int, Tensor]] = []
        shared: list[tuple[int, DTensor]] = []
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None or all_of_them:
                    is_shared = isinstance(parameter, DTensor) and not all(
                        p.is_replicate() for p in parameter.placements
                    )
                    (shared if is_shared else plain).append((number, parameter))
        places = _places_of([parameter for _, parameter in shared])
        owners = _owners([(parameter, place) for (_, parameter), place in zip(shared, places, strict=True)])
        matrices = [
            _Matrix(parameter, number, place, owner)
            for (number, parameter), place, owner in zip(shared, places, owners, strict=True)
        ]
        return plain, _buckets(matrices)

    def _step_on(self, parameters: Iterable[tuple[int, Tensor]]) -> None:
        """Call the optimizer's own step for the given parameters only."""
        chosen: dict[int, list[Tensor]] = {}
        for number, parameter in parameters:
            chosen.setdefault(number, []).append(parameter)
        if not chosen:
            return
        groups, own = self.param_groups, [self.param_groups[number]["params"] for number in chosen]
        self.param_groups = [groups[number] for number in chosen]
        try:
            for group, mine in zip(self.param_groups, chosen.values(), strict=True):
                group["params"] = mine
            _own_step(type(self))(self)
        finally:
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params
            self.param_groups = groups


@cache
def _whole_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of an optimizer that sees whole matrices, with the original name, which checkpoints record."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (WholeMatrix, kind), names)


def _own_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the wrapped optimizer's own step, without torch's step hooks, since they run around the wrapper's step."""
    step: Any = kind.__mro__[2].step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# ---- where the parts of matrices are, and which rank owns a matrix


def _places_of(parameters: Sequence[DTensor]) -> list[_Place]:
    """Return the place of each parameter's parts. All ranks call this, since they exchange the places of new parts."""
    new: dict[Any, list[DTensor]] = {}
    for parameter in parameters:
        if parameter not in _places:
            new.setdefault(_group_of(parameter), []).append(parameter)
    for group, members in new.items():
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, [box_of(parameter) for parameter in members], group=group)
        for number, parameter in enumerate(members):
            _places[parameter] = _Place(group, dist.get_rank(group), [boxes[number] for boxes in everyone])
    return [_places[parameter] for parameter in parameters]


def _group_of(parameter: DTensor) -> Any:
    """Return the process group of the ranks that share a parameter; with replicas, each replica has its own group."""
    mesh = parameter.device_mesh
    cut = [number for number, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if len(cut) == 1:
        return mesh.get_group(cut[0])
    if mesh.mesh_dim_names is None:
        raise SettingError(
            f"WholeMatrix cannot name the ranks that share a weight of shape {tuple(parameter.shape)}: its mesh of "
            f"shape {tuple(mesh.shape)} has no names. Make it by init_device_mesh(..., mesh_dim_names=...)",
            field="optimizer",
        )
    names = tuple(mesh.mesh_dim_names[number] for number in cut)
    return (mesh if len(cut) == mesh.ndim else mesh[names])._flatten().get_group()


def _owners(matrices: Sequence[tuple[DTensor, _Place]]) -> list[int]:
    """Choose the owner of each matrix: the rank with the least work so far.

    The work of a matrix is counted as the multiplications of its product with its transpose.
    """
    loads: dict[Any, list[int]] = {}
    owners = []
    for parameter, place in matrices:
        load = loads.setdefault(place.group, [0] * len(place.boxes))
        owner = load.index(min(load))
        load[owner] += parameter.numel() * min(parameter.shape, default=1)
        owners.append(owner)
    return owners


def _buckets(matrices: Sequence[_Matrix]) -> list[list[_Matrix]]:
    """Divide matrices into buckets of up to `BUCKET_BYTES`, each with one process group and one dtype."""
    alike: dict[Any, list[_Matrix]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.place.group, matrix.parameter.dtype), []).append(matrix)
    buckets: list[list[_Matrix]] = []
    for members in alike.values():
        room = 0
        for matrix in members:
            size = matrix.parameter.numel() * matrix.parameter.itemsize
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(matrix)
            room -= size
    return buckets


# ---- sending parts of matrices to the owners and back


class _Exchange:
    """An all-to-all collective that has been started.

    Args:
        group: process group of the ranks.
        to: tensors that are sent to each rank.
        sizes: number of elements that come from each rank.
        like: tensor with the same dtype and device as all of these tensors.
    """

    def __init__(self, group: Any, to: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor) -> None:
        self._sizes = list(sizes)
        lengths = [sum(tensor.numel() for tensor in tensors) for tensors in to]
        flat = [tensor.reshape(-1) for tensors in to for tensor in tensors]
        self._sent = torch.cat(flat) if flat else like.new_empty(0)
        self._received = like.new_empty(sum(sizes))
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, self._sizes, lengths, group=group, async_op=True
        )

    def finish(self) -> list[_Reader]:
        """Wait for the collective, and return a reader of what came from each rank."""
        self._work.wait()
        return [_Reader(part) for part in self._received.split(self._sizes)]


class _Reader:
    """Reader that takes tensors one after another out of a flat tensor."""

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._at = flat, 0

    def read(self, shape: Sequence[int]) -> Tensor:
        begin, self._at = self._at, self._at + math.prod(shape)
        return self._flat[begin : self._at].view(*shape)


@dataclass
class _Part:
    """This rank's part of a matrix's weight, gradient or optimizer state."""

    matrix: _Matrix
    name: str
    local: Tensor


class _Gather:
    """Transfer of a bucket's parts to the owners: weights, gradients, and state that was loaded since the last step.

    Args:
        bucket: matrices with gradients.
        state: state of the optimizer.
    """

    def __init__(self, bucket: list[_Matrix], state: dict[Any, dict[str, Any]]) -> None:
        parts: dict[torch.dtype, list[_Part]] = {}
        for matrix in bucket:
            parameter = matrix.parameter
            loaded = {key: value for key, value in state.get(parameter, {}).items() if _is_cut(value)}
            for name, tensor in {" weight": parameter, " gradient": parameter.grad, **loaded}.items():
                local = tensor.to_local().detach().to(parameter.device_mesh.device_type)
                parts.setdefault(local.dtype, []).append(_Part(matrix, name, local))
        self._bucket = bucket
        self._parts = list(parts.values())
        self._exchanges = [_to_owners(bucket[0].place, parts) for parts in self._parts]

    def finish(self, state: dict[Any, dict[str, Any]]) -> dict[DTensor, Tensor]:
        """Wait, and return this rank's own whole weights, each with its gradient; also make their state whole."""
        whole: dict[DTensor, dict[str, Tensor]] = {matrix.parameter: {} for matrix in self._bucket if matrix.is_mine}
        for parts, exchange in zip(self._parts, self._exchanges, strict=True):
            received = exchange.finish()
            for part in parts:
                if part.matrix.is_mine:
                    tensor = part.local.new_empty(part.matrix.parameter.shape)
                    place = part.matrix.place
                    for reader, (shape, _), where in zip(received, place.boxes, place.slices, strict=True):
                        tensor[where] = reader.read(shape)
                    whole[part.matrix.parameter][part.name] = tensor
        weights: dict[DTensor, Tensor] = {}
        for matrix in self._bucket:
            values = state.pop(matrix.parameter, {})
            if matrix.is_mine:
                tensors = whole[matrix.parameter]
                weight = weights[matrix.parameter] = tensors.pop(" weight")
                weight.grad = tensors.pop(" gradient")
                state[weight] = {
                    **{key: _plain(value) for key, value in values.items() if key not in tensors},
                    **tensors,
                }
        return weights


def _to_owners(place: _Place, parts: Sequence[_Part]) -> _Exchange:
    ranks = range(len(place.boxes))
    to = [[part.local for part in parts if part.matrix.owner == rank] for rank in ranks]
    mine = [part.matrix for part in parts if part.matrix.is_mine]
    return _Exchange(place.group, to, [sum(m.place.sizes[rank] for m in mine) for rank in ranks], parts[0].local)


class _Scatter:
    """Transfer of a bucket's whole tensors from the owners, divided into the parts of all ranks.

    Args:
        bucket: matrices to which the tensors belong.
        whole: whole tensors that this rank owns, by parameter.
        like: tensor with the same dtype and device as all of these tensors; None: a weight.
    """

    def __init__(self, bucket: list[_Matrix], whole: dict[DTensor, Tensor], like: Tensor | None = None) -> None:
        place = bucket[0].place
        if like is None:
            like = bucket[0].parameter.to_local().detach().to(bucket[0].parameter.device_mesh.device_type)
        mine = [matrix for matrix in bucket if matrix.is_mine]
        to = [[whole[m.parameter][m.place.slices[rank]] for m in mine] for rank in range(len(place.boxes))]
        sizes = [0] * len(place.boxes)
        for matrix in bucket:
            sizes[matrix.owner] += matrix.place.sizes[place.rank]
        self._bucket = bucket
        self._exchange = _Exchange(place.group, to, sizes, like)

    def finish(self) -> Iterator[tuple[DTensor, Tensor]]:
        """Wait, and yield each parameter with this rank's part of its tensor."""
        received = self._exchange.finish()
        for matrix in self._bucket:
            yield matrix.parameter, received[matrix.owner].read(matrix.place.boxes[matrix.place.rank][0])


# ---- the optimizer state in a checkpoint


def _cut(bucket: list[_Matrix], state: dict[Any, dict[str, Any]]) -> Iterator[tuple[DTensor, dict[str, Any]]]:
    """Divide the optimizer's state for a checkpoint. All ranks must call this.

    A state tensor with the shape of its weight is divided like the weight. Every rank gets all other values whole.
    """
    mine = {
        number: {key: _sent(value, matrix.parameter) for key, value in state.get(matrix.parameter, {}).items()}
        for number, matrix in enumerate(bucket)
        if matrix.is_mine
    }
    place = bucket[0].place
    everyone: list[Any] = [None] * len(place.boxes)
    dist.all_gather_object(everyone, mine, group=place.group)
    told: dict[int, dict[str, Any]] = {number: values for one in everyone for number, values in one.items()}
    cut: dict[DTensor, dict[str, Any]] = {matrix.parameter: {} for matrix in bucket}
    parts: dict[tuple[str, torch.dtype], list[_Matrix]] = {}
    for number, matrix in enumerate(bucket):
        here = state.get(matrix.parameter, {})
        for key, value in told[number].items():
            cut[matrix.parameter][key] = here.get(key, value)
            if isinstance(value, _Dtype):
                parts.setdefault((key, value.dtype), []).append(matrix)
    device = bucket[0].parameter.device_mesh.device_type
    for (key, dtype), members in parts.items():
        whole = {m.parameter: state[m.parameter][key].to(device) for m in members if m.is_mine}
        for parameter, local in _Scatter(members, whole, torch.empty(0, dtype=dtype, device=device)).finish():
            cut[parameter][key] = with_local(local, parameter)
    yield from cut.items()


@dataclass
class _Dtype:
    """Stand-in, in a message, for a state tensor with the shape of its weight; only the tensor's dtype is sent."""

    dtype: torch.dtype


def _sent(value: Any, parameter: DTensor) -> Any:
    """Return what a message contains for a state value: `_Dtype` for a tensor that is sent in parts, else the value."""
    if _is_cut(value):  # nothing is sent, since all ranks hold their parts: the state was loaded, and not used yet
        return None
    value = _plain(value)
    if not isinstance(value, Tensor):
        return value
    return _Dtype(value.dtype) if value.ndim and value.shape == parameter.shape else value.cpu()


def _is_cut(value: Any) -> bool:
    """Return True if a state value is a tensor of which each rank has a part."""
    return isinstance(value, DTensor) and not all(isinstance(p, Replicate) for p in value.placements)


def _plain(value: Any) -> Any:
    """Return a state value as a plain tensor if every rank has it whole; return any other value unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value
