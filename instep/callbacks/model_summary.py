"""`ModelSummary`: a table of the model's modules with their parameters, sizes and floating-point operations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.callbacks.base import Callback, is_terminal, print_text
from instep.distributed import find_batch_size, send_to_device
from instep.distributed.nested import map_leaves
from instep.errors import SettingError
from instep.utils.checks import is_int
from instep.utils.flops import FlopCounter
from instep.utils.seed import isolate_rng
from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

UNKNOWN_SIZE = "?"
LEFTOVER_PARAMS_NAME = "other params"
_NUMBERS = ("Params", "Trainable", "FLOPs")  # columns that are aligned to the right
_MB = 1_000_000


def _check_depth(depth: Any) -> int:
    if not is_int(depth, -1):
        raise SettingError(
            f"`max_depth` can be -1, 0 or > 0, got {depth}. -1 shows all modules, 0 the totals only.",
            field="max_depth",
            got=depth,
        )
    return depth


@dataclass(frozen=True)
class SummaryRow:
    """The table's row for one module: its dotted name, class, number of parameters, mode ("train" or "eval") and so on.

    `params` and `trainable` count elements. `in_size` and `out_size` are the shapes of the input and the output of the
    module's first call, nested like the data, and `flops` is the number of floating-point operations of its forward
    pass. These three are None if the whole module has no `example_input_array`, or if its forward does not call this
    module.
    """

    name: str
    type: str
    params: int
    trainable: int
    mode: str
    in_size: Any = None
    out_size: Any = None
    flops: int | None = None


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of `summarize`: a row for each module, and totals. `str(summary)` is the table as plain text.

    Tied parameters count once in the totals. Parameters of lazy modules count 0 until they have a shape. The object
    also has the attributes of Lightning's `ModelSummary`: `total_parameters`, `layer_names`, `in_sizes`, `total_flops`
    and so on.
    """

    rows: tuple[SummaryRow, ...]
    total_params: int
    trainable_params: int
    params_bytes: int
    buffers_bytes: int
    has_lazy: bool
    has_absent: bool
    """Whether some of the module's parts are on other ranks; those parts have no rows."""
    total_training_modes: Mapping[str, int] = field(default_factory=dict)
    """Number of modules in "train" and in "eval" mode, without the root module."""
    total_flops: int = 0
    """Floating-point operations of a forward pass of the `example_input_array`; 0 without one."""
    flops_per_sample: float | None = None
    """Floating-point operations per sample of the `example_input_array`; None if unknown."""
    flop_counts: Mapping[str, Mapping[Any, int]] = field(default_factory=dict)
    """Number of operations in the forward pass of each row's module, by kind of operation."""
    leftover: SummaryRow | None = None
    """Row for parameters in no other row: those of the root module itself, and of modules that are left out."""

    @property
    def frozen_params(self) -> int:
        """Number of parameters that do not require gradients."""
        return self.total_params - self.trainable_params

    @property
    def size_mb(self) -> float:
        """Size of parameters and buffers in megabytes of 1,000,000 bytes, by their current dtypes."""
        return (self.params_bytes + self.buffers_bytes) / _MB

    # ---- attributes of Lightning's ModelSummary

    total_parameters = property(lambda self: self.total_params)
    trainable_parameters = property(lambda self: self.trainable_params)
    model_size = property(lambda self: self.size_mb)
    layer_names = property(lambda self: [row.name for row in self.rows])
    layer_types = property(lambda self: [row.type for row in self.rows])
    param_nums = property(lambda self: [row.params for row in self.rows])
    total_layer_params = property(lambda self: sum(row.params for row in self.rows))
    training_modes = property(lambda self: [row.mode == "train" for row in self.rows])
    in_sizes = property(lambda self: [row.in_size or UNKNOWN_SIZE for row in self.rows])
    out_sizes = property(lambda self: [row.out_size or UNKNOWN_SIZE for row in self.rows])

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the table's columns: pairs of a title and the list of the rows' texts; [] if there are no rows."""
        rows = self.rows if self.leftover is None else (*self.rows, self.leftover)
        if not self.rows:
            return []
        columns = [
            (" ", [str(number) for number in range(len(rows))]),
            ("Name", [clean(row.name, "") for row in rows]),
            ("Type", [row.type for row in rows]),
            ("Params", [count(row.params) for row in rows]),
            ("Trainable", [count(row.trainable) for row in rows]),
            ("Mode", [row.mode for row in rows]),
        ]
        if any(row.in_size is not None for row in rows):
            columns += [
                ("FLOPs", ["" if row.flops is None else count(row.flops) for row in rows]),
                ("In sizes", [str(row.in_size or UNKNOWN_SIZE) for row in rows]),
                ("Out sizes", [str(row.out_size or UNKNOWN_SIZE) for row in rows]),
            ]
        return columns

    def notes(self) -> list[str]:
        """Return the lines of remarks that are printed below the totals."""
        lines = []
        if self.total_flops and self.flops_per_sample is not None:
            lines.append(f"{count(round(self.flops_per_sample))} of these operations a sample")
        if self.has_lazy:
            lines.append("Some parameters have no shape before the first batch and are not counted.")
        if self.has_absent:
            lines.append("This is this rank's stage of the model only; the other parts are on other ranks.")
        return lines

    def __str__(self) -> str:
        totals = _totals(self.total_params, self.trainable_params, self.size_mb, self.total_flops)
        return "\n".join([*_plain(self.columns()), *totals, *self.notes()])

    __repr__ = __str__


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Count a module's parameters, and measure sizes and operations in a forward pass of its example input.

    The forward pass changes nothing: modes, buffers, attributes of the modules and random generators are restored.

    Args:
        module: any module; parameters may be on the meta device, or sharded (the whole parameters are counted). If it
            has an `example_input_array` (a tensor, the list of `forward`'s arguments, or a dict of them), its forward
            runs once, in eval mode and without gradients, to find the sizes of inputs and outputs and the number of
            operations. Otherwise there is no forward pass.
        max_depth: modules up to this depth get a row (1: only the children); 0: none; -1: all modules.

    Returns:
        The table's rows and the totals.

    Raises:
        SettingError: `max_depth` is below -1.

    Example:
        >>> summarize(nn.Linear(3, 2)).total_params
        8
    """
    _check_depth(max_depth)
    rows: list[SummaryRow] = []
    absent = {part for part in module.modules() if hasattr(part, "_absent_name")}
    shown = {
        name: child
        for name, child in module.named_modules()
        if name and child not in absent and (max_depth == -1 or name.count(".") < max_depth)
    }
    lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
    runs = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    example = getattr(module, "example_input_array", None) if runs and not absent and not lazy else None
    sizes, flops, total_flops = ({}, {}, 0) if example is None else _measure(module, shown, example)
    modes = [child.training for child in module.modules()][1:]
    in_rows = {id(parameter) for child in shown.values() for parameter in child.parameters()}
    others = [parameter for parameter in module.parameters() if id(parameter) not in in_rows] if shown else []
    for name, child in shown.items():
        mode = "train" if child.training else "eval"
        in_size, out_size = sizes.get(name, (None, None))
        work = sum(flops[name].values()) if name in flops else None
        rows.append(SummaryRow(name, type(child).__name__, *_sizes(child.parameters()), mode, in_size, out_size, work))
    total, trainable = _sizes(module.parameters())
    return Summary(
        rows=tuple(rows),
        total_params=total,
        trainable_params=trainable,
        params_bytes=sum(_bytes(parameter) for parameter in module.parameters()),
        buffers_bytes=sum(_bytes(buffer) for buffer in module.buffers()),
        has_lazy=lazy,
        has_absent=bool(absent),
        total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
        total_flops=total_flops,
        flops_per_sample=total_flops / samples if total_flops and (samples := find_batch_size(example)) else None,
        flop_counts=flops,
        leftover=SummaryRow(LEFTOVER_PARAMS_NAME, "", *_sizes(others), "") if others else None,
    )


def _sizes(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the number of elements of all parameters, and of those that require gradients."""
    sizes = [(_elements(parameter), parameter.requires_grad) for parameter in parameters]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _measure(
    module: nn.Module, shown: dict[str, nn.Module], example: Any
) -> tuple[dict[str, tuple[Any, Any]], dict[str, dict[Any, int]], int]:
    """Run the module's forward on its example input.

    Returns:
        The input and output shapes of each module in `shown`; the operations of each module, by kind; and the total
        number of operations.
    """
    sizes: dict[str, tuple[Any, Any]] = {}
    flops = {name: Counter[Any]() for name in shown}
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is not None:
        example = send_to_device(example, first.device)
        if first.dtype in (torch.float16, torch.bfloat16):
            example = map_leaves(lambda leaf: _as(leaf, first.dtype), example)
    counter = FlopCounter()
    run = module._call_impl  # calls the forward that is not compiled: compiling takes too long for one run
    with ExitStack() as stack:
        for name, child in shown.items():

            def begin(_: Any, args: Any, name: str = name) -> None:
                flops[name].subtract(counter.counts)

            def end(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name) -> None:
                flops[name].update(counter.counts)
                given = (*args, *kwargs.values())
                sizes.setdefault(name, (_shape(given[0] if len(given) == 1 else given), _shape(output)))

            if not isinstance(child, torch.jit.ScriptModule):  # a ScriptModule does not accept hooks in Python
                stack.callback(child.register_forward_pre_hook(begin).remove)
                stack.callback(child.register_forward_hook(end, with_kwargs=True).remove)
        stack.enter_context(torch.no_grad())
        # Restore the random generators, so that a run with a summary equals a run without it.
        stack.enter_context(isolate_rng())
        stack.enter_context(_kept(module))
        module.eval()
        stack.enter_context(counter)
        if isinstance(example, dict):
            run(**example)
        else:
            run(*(example if isinstance(example, list | tuple) else (example,)))
    return sizes, {name: dict(+flops[name]) for name in sizes}, counter.total


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes, modes and buffers of all modules at the end of the `with` block."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in parts]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for buffer, value in values:
            buffer.copy_(value)
        for part, training in modes:
            part.training = training


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _shape(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_shape(part) for part in data]
    return list(data.shape) if hasattr(data, "shape") else UNKNOWN_SIZE


class ModelSummary(Callback):
    """Print a table of the model's modules before training, and the order in which the callbacks run.

    Global rank 0 prints a rich table on a terminal, and plain text elsewhere. A subclass may override `summarize` to
    print it in another way.

    Args:
        max_depth: modules up to this depth get a row (1: only the children); 0: totals only; -1: all modules.
        **summarize_kwargs: passed on to `summarize`.

    Raises:
        SettingError: `max_depth` is below -1.

    Example:
        >>> ModelSummary(max_depth=2).state_key
        'ModelSummary'
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        self.max_depth = _check_depth(max_depth)
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Count on every rank, since a sharded module may need collectives for it.
        summary = summarize(module, self.max_depth)
        if not trainer.is_global_zero:
            return
        self.summarize(
            summary.columns(),
            summary.total_params,
            summary.trainable_params,
            summary.size_mb,
            dict(summary.total_training_modes),
            total_flops=summary.total_flops,
            **self._summarize_kwargs,
        )
        for note in summary.notes():
            print_text(trainer, note)
        said = (f"{type(each).__name__}{each._origin and f' ({each._origin})'}" for each in trainer.callbacks)
        print_text(trainer, f"Callbacks, as they run: {', '.join(said)}")

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the summary. Override this method to print it in another way. Called on global rank 0 only.

        Args:
            summary_data: the table's columns: pairs of a title and the texts of the rows; empty without rows.
            total_parameters: number of all parameters.
            trainable_parameters: number of parameters that require gradients.
            model_size: size of parameters and buffers in megabytes.
            total_training_modes: number of modules in "train" and in "eval" mode.
            total_flops: operations of a forward pass of the example input; 0 without an example.
            **summarize_kwargs: the `summarize_kwargs` of the callback's constructor.
        """
        totals = _totals(total_parameters, trainable_parameters, model_size, total_flops)
        if is_terminal(sys.stdout) and summary_data:
            _print_rich(summary_data, totals, "bold", box=None, pad_edge=False)
        else:
            print("\n".join([*_plain(summary_data), *totals]))  # noqa: T201  it is a table to read


class RichModelSummary(ModelSummary):
    """A `ModelSummary` that always prints a rich table, also where the output is not a terminal.

    Args:
        max_depth: modules up to this depth get a row (1: only the children); 0: totals only; -1: all modules.
        **summarize_kwargs: passed on to `summarize`, which uses `header_style`: a rich style for the table's header.

    Example:
        >>> RichModelSummary(max_depth=2, header_style="bold green").max_depth
        2
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the summary as a rich table; the arguments are those of `ModelSummary.summarize`."""
        totals = [
            *_totals(total_parameters, trainable_parameters, model_size, total_flops),
            f"{total_training_modes['train']} modules in train mode, {total_training_modes['eval']} in eval mode",
        ]
        _print_rich(summary_data, totals, summarize_kwargs.get("header_style", "bold magenta"))


def _totals(params: int, trainable: int, size_mb: float, flops: int) -> list[str]:
    """Return the lines with the totals, which are printed below the table."""
    lines = [f"{count(params)} parameters, {count(trainable)} trainable, {count(params - trainable)} frozen; "]
    lines[0] += f"{size_mb:,.3f} MB"
    return lines + [f"{count(flops)} floating-point operations in a forward pass of the example"] * bool(flops)


def _plain(columns: list[tuple[str, list[str]]]) -> list[str]:
    """Format the table's columns as lines of plain text; no lines if there are no rows."""
    padded = []
    for title, texts in columns:
        width = max(len(text) for text in (title, *texts))
        number = title in _NUMBERS
        padded.append([text.rjust(width) if number else text.ljust(width) for text in (title.strip(), *texts)])
    text = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
    return [*text[:1], "-" * max(map(len, text)), *text[1:]] if text else []


def _print_rich(columns: list[tuple[str, list[str]]], totals: list[str], header_style: str, **look: Any) -> None:
    from rich.console import Console  # slow to import, so imported only when a table is drawn
    from rich.table import Table

    console = Console()
    if columns:
        table = Table(header_style=header_style, **look)
        for title, _ in columns:
            number = title in _NUMBERS
            style = {" ": "dim", "Type": "green", "Name": None}.get(title, None if number else "dim")
            table.add_column(title, justify="right" if number else "left", style=style, no_wrap=title == "Name")
        for line in zip(*(texts for _, texts in columns), strict=True):
            table.add_row(*line)
        console.print(table)
    console.print("\n".join(totals), highlight=False)


def count(number: int) -> str:
    """Format a number with at most three digits and a unit: 950, 1.3 K, 124 M.

    Example:
        >>> count(124_439_808)
        '124 M'
    """
    if number < 1000:
        return str(number)
    value, units = number / 1000, ["T", "B", "M", "K"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop()
    return f"{value:.1f} {units[-1]}" if value < 99.95 else f"{value:.0f} {units[-1]}"


def _elements(tensor: torch.Tensor) -> int:
    # DeepSpeed's stage 3 replaces a parameter by an empty tensor, whose `ds_numel` is the size of the whole parameter.
    return 0 if nn.parameter.is_lazy(tensor) else getattr(tensor, "ds_numel", tensor.numel())


def _bytes(tensor: torch.Tensor) -> int:
    return _elements(tensor) and _elements(tensor) * tensor.element_size()
