"""Pipeline inference: a traced model in stages, one on each rank, by `torch.distributed.pipelining`.

`torch.export` traces the model for one micro-batch, the graph is cut where modules begin, and each rank keeps one part.
A trace is valid for one shape; for each new shape, such as longer texts, the model is traced again. The number of
samples is free: micro-batches have the traced size, and a smaller last one is padded, and its output cut.

The first rank sends the description of a batch (shapes, dtypes, settings) to the other ranks, and all ranks act on it.
So only the first rank needs the values of the inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, ScheduleGPipe, build_stage, pipeline
from torch.fx.node import map_aggregate

from instep.distributed import broadcast, broadcast_object
from instep.distributed.nested import iter_leaves, map_leaves, tensor_leaves, with_tensors
from instep.errors import DataError, SettingError, UsageError
from instep.state import PartialState
from instep.strategies.materialize import deferred_weights, read_values
from instep.strategies.pipeline.split import even_cuts
from instep.utils.imports import check_torch

_ROOT = "model."  # prefix that the names of the model's weights have in a trace
_SLOT = object()  # object that marks the place of a tensor in nested data


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Spread a model over all ranks as a pipeline for inference, one stage on each; all ranks must call this.

    Afterwards `model(...)` cuts its batch into micro-batches, which pass through the stages one behind another. All
    ranks must make the same calls; only the first rank's input values are used. No gradients are computed.

    A model that was built without values (`init_empty_weights`) and knows its checkpoint (`load_checkpoint_in_model` in
    the same block) is never whole in the memory of any rank: each rank reads only the weights of its stage.

    If torch.export cannot trace a model, split the model by hand, with `TrainModule.pipeline_stages`,
    `MeshStrategy(pp=N)` and `Trainer.predict`.

    Args:
        model: the model, on the CPU, on this rank's device, or without values. Its forward is replaced, and it
            is put into eval mode.
        split_points: names of the modules with which the stages after the first begin, in the order of the forward;
            "auto" makes the largest stage as small as can be.
        no_split_module_classes: names of classes that "auto" does not cut through. Default: the model's own
            `_no_split_modules`, else the entries of its ModuleLists are not cut.
        example_args: inputs for tracing the model now, so that an untraceable model raises here. Without them, the
            first batch is traced.
        example_kwargs: inputs for tracing that are passed by name.
        num_chunks: number of micro-batches per batch; by default one for each rank. More micro-batches keep the ranks
            busier.
        gather_output: whether every rank gets the output. If not, the last rank gets it, and the other ranks get None.

    Returns:
        The model itself. Its `hf_split_points` are the names where stages begin, once it is traced.

    Raises:
        SettingError: an argument is wrong, or the model has a device map, or weights without values in any file.
        DataError: the inputs have no common batch dimension, or an output has none.
        UsageError: torch.export cannot trace the model.
        CorruptCheckpointError: a file of the checkpoint is damaged.

    Example:
        >>> with init_empty_weights():  # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config)
        ...     load_checkpoint_in_model(model, folder)
        >>> model = prepare_pippy(model, example_args=(ids[:1],), gather_output=True)  # doctest: +SKIP
        >>> logits = model(ids).logits  # doctest: +SKIP

    Source:
        Name and arguments are those of Hugging Face Accelerate's prepare_pippy. The schedule: Huang et al., GPipe, 2019
        (arXiv:1811.06965).
    """
    stages = PartialState().num_processes
    if stages > 1:  # torch before 2.11 fails when it traces, or when it runs a single micro-batch
        check_torch(2, 11, purpose="prepare_pippy with several processes")
    if num_chunks is not None and num_chunks < 1:
        raise SettingError(f"num_chunks={num_chunks} must be at least 1", field="num_chunks", got=num_chunks)
    if len(getattr(model, "hf_device_map", None) or ()) > 1:
        raise SettingError(
            "the model has a device map, and a pipeline puts one stage on each process. Load it without device_map.",
            field="model",
        )
    points = None if split_points == "auto" else _checked_points(model, split_points, stages)
    known = deferred_weights(model)
    empty = [name for name, tensor in _tensors_of(model) if tensor.is_meta and name not in known]
    if empty:
        raise SettingError(
            f"{', '.join(empty[:5])} of the model have no values: they are on the meta device. Call "
            "load_checkpoint_in_model inside the block of init_empty_weights; buffers that a checkpoint lacks must be "
            "real, as they are with include_buffers=False.",
            field="model",
        )
    model.eval()
    if stages == 1:
        read_values(model, PartialState().device, lambda stored, _: _mapped(stored))
        model.hf_split_points = []  # type: ignore[assignment]
        return model
    cut = _Cut(stages, points, _units_of(model, no_split_module_classes), PartialState().device)
    runs = _Pipeline(model, cut, num_chunks or stages, gather_output)
    if example_args or example_kwargs:
        runs.prepare(*example_args, **(example_kwargs or {}))
    model.forward = runs
    return model


def _checked_points(model: nn.Module, points: str | Sequence[str], stages: int) -> list[str]:
    names = dict(model.named_modules(remove_duplicate=False))
    unknown = [] if isinstance(points, str) else [point for point in points if point not in names]
    if isinstance(points, str) or unknown or len(set(points)) != len(points) or len(points) != stages - 1:
        raise SettingError(
            f"split_points={points!r} must be 'auto', or name the {stages - 1} modules that the stages of {stages} "
            "processes but the first one begin with"
            + (f"; the model has no {', '.join(map(repr, unknown))}." if unknown else "."),
            field="split_points",
            got=points,
        )
    return list(points)


def _units_of(model: nn.Module, classes: Sequence[str] | None) -> set[str]:
    """List the modules, by name, with which an automatically chosen stage may begin."""
    if classes is None:
        classes = list(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    whole = {name for name, module in modules.items() if type(module).__name__ in classes}
    if not classes:
        lists = [(name, module) for name, module in modules.items() if isinstance(module, nn.ModuleList)]
        whole = {f"{name}.{key}".removeprefix(".") for name, module in lists for key, _ in module.named_children()}
    return whole | {name for name, module in modules.items() if any(True for _ in module.parameters(recurse=False))}


def _tensors_of(model: nn.Module, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=not tied)
    yield from model.named_buffers(remove_duplicate=not tied)


def _leaves(data: Any) -> list[Tensor]:
    return [leaf for _, leaf in iter_leaves(data) if isinstance(leaf, Tensor)]


def _outline_of(data: Any) -> Any:
    return map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, data)


class _Pipeline:
    """Forward function of a model that runs as a pipeline.

    Args:
        model: the whole model; weights of other ranks' stages are never read.
        cut: places where the model is cut.
        chunks: maximum number of micro-batches in a batch.
        gathers: whether every rank gets the output.
    """

    def __init__(self, model: nn.Module, cut: _Cut, chunks: int, gathers: bool) -> None:
        self.model, self.cut, self.chunks, self.gathers, self.state = model, cut, chunks, gathers, PartialState()
        self._places = deferred_weights(model)
        self._traces: dict[Any, _Trace] = {}
        self._first_names: dict[str, str] = {}  # first name of each tied weight
        first: dict[int, str] = {}
        for name, tensor in _tensors_of(model, tied=True):
            self._first_names[name] = first.setdefault(id(tensor), name)
        self._weights: dict[str, Tensor] = {}  # weights of this rank's stage, on its device

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Trace the model for inputs of the given shapes; all ranks must call this."""
        self._trace(*self._agreed((args, kwargs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outline, batch = self._agreed((args, kwargs))
        trace = self._trace(outline, batch)
        chunks = -(-batch // trace.size)
        with torch.no_grad():
            outputs = trace.run(chunks, _leaves((args, kwargs)) if self.state.is_main_process else [])
        if not self.gathers and not self.state.is_last_process:
            return None
        shapes = [(one.shape[0] // trace.size * batch, *one.shape[1:]) for one in _leaves(trace.output)]
        if self.state.is_last_process:
            tensors = [output[: shape[0]] for output, shape in zip(outputs, shapes, strict=True)]
        else:
            kinds = [one.dtype for one in _leaves(trace.output)]
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.state.device)
                for shape, dtype in zip(shapes, kinds, strict=True)
            ]
        if self.gathers:
            tensors = broadcast(tensors, self.state.num_processes - 1)
        return with_tensors(trace.output, tensors)

    def _agreed(self, inputs: Any) -> tuple[Any, int]:
        """Return the first rank's inputs, as tensors without values, and the number of samples, on every rank."""
        outline = broadcast_object(_outline_of(inputs))
        sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in _leaves(outline)}
        if len(sizes - {1}) > 1 or not sizes or 0 in sizes:
            raise DataError(
                "inputs of a pipeline must be tensors whose first dimension is the batch, or 1 for what all samples "
                f"share; got the sizes {sorted(sizes)}"
            )
        return outline, max(sizes)

    def _trace(self, outline: Any, batch: int) -> _Trace:
        kind = tuple(
            (where, (tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf))
            for where, leaf in iter_leaves(outline)
        )
        size = -(-batch // self.chunks)
        known = self._traces.get(kind)
        if known is None or known.size < size:
            known = self._traces[kind] = self._make(outline, size)
        return known

    def _make(self, outline: Any, size: int) -> _Trace:
        called, pipelined = _Called(self.model, outline), self.model.__dict__.pop("forward", None)
        try:
            with torch.no_grad(), _stand_ins(self.model), _without_cache(self.model), warnings.catch_warnings():
                # Ignore the warning that torch itself causes by using its deprecated class LeafSpec in a deepcopy.
                warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
                device = next((tensor.device for _, tensor in _tensors_of(self.model)), torch.device("cpu"))
                example = [
                    torch.zeros(size, *leaf.shape[1:], dtype=leaf.dtype, device=device) for leaf in _leaves(outline)
                ]
                pipe = pipeline(called, mb_args=tuple(example), split_policy=self.cut.mark)
        except RuntimeError as error:
            raise UsageError(
                f"torch.export cannot trace {type(self.model).__name__}, so that it cannot be cut into stages: "
                f"{error.__cause__ or error}. Cut it by hand (TrainModule.pipeline_stages and MeshStrategy(pp=...)) "
                "or split the inputs over processes (split_between_processes)."
            ) from error
        finally:
            if pipelined is not None:
                self.model.forward = pipelined
        self.model.hf_split_points = self.cut.points  # type: ignore[assignment]
        return _Trace(pipe, size, called.output(), self.state, self._here)

    def _here(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight on this rank's device, without a copy if the model or a mapped file has it there already."""
        name = self._first_names.get(name, name)
        if name not in self._weights:
            place = self._places.get(name)
            value = tensor.detach() if place is None else _mapped(place).to(tensor.dtype)
            self._weights[name] = value.to(self.state.device)
        return self._weights[name]


def _mapped(stored: Any) -> Tensor:
    """Return a stored tensor mapped from its file; read it if it cannot be mapped."""
    return stored if isinstance(stored, Tensor) else stored.map() if hasattr(stored, "map") else stored.read()


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace tensors on the meta device by tensors on the CPU, since torch.export does not accept both in one model.

    Nothing is written into the new tensors, so they take addresses but no memory.
    """
    made: dict[Tensor, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for owner in model.modules():
            for entries in (owner._parameters, owner._buffers):
                held: dict[str, Any] = entries
                for key, value in held.items():
                    if value is not None and value.is_meta:
                        if value not in made:
                            empty = torch.empty(value.shape, dtype=value.dtype)
                            is_weight = isinstance(value, nn.Parameter)
                            made[value] = nn.Parameter(empty, requires_grad=False) if is_weight else empty
                        before.append((held, key, value))
                        held[key] = made[value]
        yield
    finally:
        for held, key, value in before:
            held[key] = value


class _Called(nn.Module):
    """Module that calls a model with tensors only, as a pipeline stage is called, and returns a tuple of tensors.

    Args:
        model: the model that is called.
        inputs: (args, kwargs); their tensors are replaced by the tensors of a call.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        found: list[tuple[Any, list[tuple[tuple[int, ...], torch.dtype]]]] = []
        # `forward` calls these functions, since under torch.export it must not assign to attributes of the module.
        self._call = lambda tensors: with_tensors(inputs, tensors)
        self._note = lambda *what: found.append(what)
        self._found = lambda: found[-1]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._call(tensors)
        output = self.model(*args, **kwargs)
        leaves = tuple(tensor for _, tensor in tensor_leaves(output, "the output of a pipeline"))
        for tensor in leaves:
            if not tensor.ndim or tensor.shape[0] % tensors[0].shape[0]:
                raise DataError(
                    f"an output of {type(self.model).__name__} has the shape {tuple(tensor.shape)}, without a batch "
                    "dimension to join micro-batches along. Leave out the labels that a loss is made of, or return "
                    "what belongs to each sample."
                )
        slots = map_leaves(lambda leaf: _SLOT if isinstance(leaf, Tensor) else leaf, output)
        self._note(slots, [(tuple(tensor.shape), tensor.dtype) for tensor in leaves])
        return leaves

    def output(self) -> Any:
        """Return the traced model's output; its tensors are on the meta device, so they have shapes but no values."""
        slots, outlines = self._found()
        tensors = iter([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in outlines])
        return map_leaves(lambda leaf: next(tensors) if leaf is _SLOT else leaf, slots)


class _Trace:
    """A model traced for inputs of one shape, and this rank's stage of it.

    Args:
        pipe: pipeline of all stages.
        size: number of samples in a micro-batch.
        output: output of the model for a micro-batch; its tensors are on the meta device, without values.
        state: state of this process.
        here: function that returns the weight with a name, on this rank's device.
    """

    def __init__(
        self, pipe: Pipe, size: int, output: Any, state: PartialState, here: Callable[[str, Tensor], Tensor]
    ) -> None:
        self.size, self.output, self._state, self._info = size, output, state, pipe.info()
        self._schedules: dict[int, ScheduleGPipe] = {}
        inputs = [node.name for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
        first = next(node for node in pipe.split_gm.graph.nodes if node.op == "call_module")
        self._used = [inputs.index(node.name) for node in first.args if isinstance(node, fx.Node)]
        self._stage = pipe.get_stage_module(state.process_index)
        for path, part in self._stage.named_modules():
            for name, weight in part._parameters.items():
                if weight is not None:
                    weight = here(f"{path}.{name}".removeprefix(_ROOT), weight)
                    part._parameters[name] = nn.Parameter(weight, requires_grad=False)
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else here(f"{path}.{name}".removeprefix(_ROOT), buffer)

    def run(self, chunks: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run micro-batches through the stages; all ranks must call this.

        Args:
            chunks: number of micro-batches.
            tensors: the inputs, on the first rank.

        Returns:
            The outputs, on the last rank.
        """
        state = self._state
        if chunks not in self._schedules:
            stage = build_stage(self._stage, state.process_index, self._info, state.device)
            self._schedules[chunks] = ScheduleGPipe(stage, chunks)
        rows = [_filled(tensors[i], chunks * self.size).to(state.device) for i in self._used if tensors]
        output: Any = self._schedules[chunks].step(*rows)
        output = tuple(output) if isinstance(output, list) else output
        return () if output is None else output if isinstance(output, tuple) else (output,)


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """Pad a batch to `rows` rows with copies of its last row, so that it has whole micro-batches."""
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])


class _Cut:
    """Places where a traced model is cut into stages.

    Args:
        stages: number of stages.
        points: names of the modules with which the stages after the first begin; None until a trace has shown the
            sizes.
        units: names of the modules with which an automatic cut may begin a stage; of nested modules, the outermost
            counts.
        device: device of this rank's stage.
    """

    def __init__(self, stages: int, points: list[str] | None, units: set[str], device: torch.device) -> None:
        self.stages, self.points, self._units, self._device = stages, points, units, device

    def mark(self, traced: fx.GraphModule) -> fx.GraphModule:
        """Mark the end of each stage in a graph, as torch does; make the values between stages ready to be sent."""
        graph = traced.graph
        for node in list(graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                # Erase this check, since it would compare a tensor's device with the device that was used for tracing.
                graph.erase_node(node)
            elif node.op == "call_function":
                node.args, node.kwargs = (map_aggregate(given, self._moved) for given in (node.args, node.kwargs))
                if node.target is getitem:
                    # Stages cannot send tuples, so the element is taken directly after the node that returns the tuple.
                    node.args[0].append(node)
        order = [node for node in graph.nodes if node.op == "call_function"]
        if self.points is None:
            self.points = self._balanced(traced, order)
        starts = self._starts(order, self.points)
        stage_of = {node: sum(order.index(node) >= start for start in starts) for node in order}
        stage_of.update((node, 0) for node in graph.nodes if node.op == "placeholder")
        for node, stage in list(stage_of.items()):
            later = [user for user in node.users if stage_of.get(user, stage) > stage]
            value = node.meta.get("val")
            # A stage gets contiguous tensors, and only from earlier stages. So copy a value that a later stage uses, if
            # the caller gives it or if it is not contiguous.
            if later and (node.op == "placeholder" or not (isinstance(value, Tensor) and value.is_contiguous())):
                with graph.inserting_before(order[0] if node.op == "placeholder" else node.next):
                    copied = _copy(graph, node, order[0] if node.op == "placeholder" else node)
                for user in later:
                    user.replace_input_with(node, copied)
        for start in starts:
            with graph.inserting_before(order[start]):
                graph.call_function(torch.ops.pippy._pipe_split.default)
        self._keep_outputs(graph, stage_of)
        traced.recompile()
        return traced

    def _moved(self, given: Any) -> Any:
        return self._device if isinstance(given, torch.device) else given

    def _keep_outputs(self, graph: fx.Graph, stage_of: Mapping[fx.Node, int]) -> None:
        """Make the last stage return every output; outputs of an earlier stage pass through the last one."""
        end = next(node for node in graph.nodes if node.op == "output")
        with graph.inserting_before(end):
            for node in end.all_input_nodes:
                if stage_of.get(node) != self.stages - 1:
                    end.replace_input_with(node, _copy(graph, node, end.prev))

    def _starts(self, order: Sequence[fx.Node], points: Sequence[str]) -> list[int]:
        """Return the position of the first node of each module with which a stage begins."""
        paths = [_path_of(node) for node in order]
        starts = []
        for point in points:
            inside = (i for i, path in enumerate(paths) if f"{path}.".startswith(f"{point}."))
            starts.append(next(inside, 0))
        if any(a >= b for a, b in pairwise([0, *starts])):
            raise SettingError(
                f"split_points={list(points)!r} must be modules that the forward runs one after another, the first not "
                f"at its very beginning; it begins to run them at steps {starts} of {len(order)}",
                field="split_points",
                got=list(points),
            )
        return starts

    def _balanced(self, traced: fx.GraphModule, order: Sequence[fx.Node]) -> list[str]:
        """Choose the modules at which stages begin, so that the largest stage has as few bytes as possible."""
        begun: list[str] = [""]
        sizes = [0]
        counted: set[tuple[int, Any]] = set()
        for node in order:
            path = _path_of(node)
            unit = next((name for name in _prefixes(path) if name in self._units), "")
            if unit not in begun:
                begun.append(unit)
                sizes.append(0)
            for weight in node.all_input_nodes:
                if weight.op == "get_attr" and (len(sizes), weight.target) not in counted:
                    counted.add((len(sizes), weight.target))
                    sizes[-1] += attrgetter(str(weight.target))(traced).nbytes
        if not sizes[0]:  # no weights before the first module: drop this empty entry
            del begun[0], sizes[0]
        if len(begun) < self.stages:
            raise SettingError(
                f"{self.stages} stages, one for each process, cannot be made of the {len(begun)} parts that the model "
                f"has: {', '.join(begun)}. Use fewer processes, or name smaller modules in split_points.",
                field="split_points",
            )
        return [begun[start] for start in even_cuts(sizes, self.stages)]


def _copy(graph: fx.Graph, node: fx.Node, beside: fx.Node) -> fx.Node:
    """Insert a contiguous copy of a tensor into a graph, marked as made by the module that made `beside`."""
    copied = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copied.meta = {**beside.meta, "val": node.meta["val"].contiguous()}
    return copied


def _path_of(node: fx.Node) -> str:
    """Return the name of the module whose forward makes a node."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
    return str(stack[-1][0]).removeprefix(_ROOT)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Make a transformers model return no cache of keys and values, which is not a tensor and would not be used."""
    configs: list[Any] = [
        getattr(module, "config", None) for module in model.modules()
    ]  # all modules, since an encoder and a decoder each have their own config
    before = [(one, one.use_cache) for one in configs if hasattr(one, "use_cache")]
    try:
        for one, _ in before:
            one.use_cache = False
        yield
    finally:
        for one, value in reversed(before):
            one.use_cache = value
