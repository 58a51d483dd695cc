"""A table of the model's parts and their sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.callbacks.base import Callback
from instep.distributed import send_to_device
from instep.distributed.nested import map_leaves
from instep.utils.checks import at_least
from instep.utils.seed import isolate_rng

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

UNKNOWN_SIZE = "?"
_MB = 1_000_000
_DEPTH = at_least(-1, "-1 for all, 0 for totals only")


@dataclass(frozen=True)
class SummaryRow:
    """One module: its dotted name, class, parameters (elements), those that are trained, its mode, and its sizes.

    The sizes are those of its first input and output where the whole module has an `example_input_array`: shapes,
    nested as the data are; None where unknown.
    """

    name: str
    type: str
    params: int
    trainable: int
    mode: str
    in_size: Any = None
    out_size: Any = None


@dataclass(frozen=True)
class Summary:
    """Sizes of a module and its parts, as `summarize` counts them; `str` gives the table as plain text.

    Tied parameters count once in the totals. Parameters of lazy modules count 0 until they have a shape.
    """

    rows: tuple[SummaryRow, ...]
    total_params: int
    trainable_params: int
    params_bytes: int
    buffers_bytes: int
    has_lazy: bool
    has_absent: bool
    """Whether some of the module's parts are on other ranks; they have no rows."""

    @property
    def frozen_params(self) -> int:
        """Parameters that are not trained."""
        return self.total_params - self.trainable_params

    @property
    def size_mb(self) -> float:
        """Parameters and buffers in megabytes of 1,000,000 bytes, by their dtypes now."""
        return (self.params_bytes + self.buffers_bytes) / _MB

    # Lightning's names

    total_parameters = property(lambda self: self.total_params)
    trainable_parameters = property(lambda self: self.trainable_params)
    model_size = property(lambda self: self.size_mb)
    layer_names = property(lambda self: [row.name for row in self.rows])
    layer_types = property(lambda self: [row.type for row in self.rows])
    param_nums = property(lambda self: [row.params for row in self.rows])
    in_sizes = property(lambda self: [row.in_size or UNKNOWN_SIZE for row in self.rows])
    out_sizes = property(lambda self: [row.out_size or UNKNOWN_SIZE for row in self.rows])

    def columns(self) -> list[tuple[str, bool, list[str]]]:
        """Return the table's columns: title, whether it is of numbers, and a text for each row."""
        rows = self.rows
        columns = [
            ("", False, [str(number) for number in range(len(rows))]),
            ("Name", False, [row.name for row in rows]),
            ("Type", False, [row.type for row in rows]),
            ("Params", True, [count(row.params) for row in rows]),
            ("Trainable", True, [count(row.trainable) for row in rows]),
            ("Mode", False, [row.mode for row in rows]),
        ]
        if any(row.in_size is not None for row in rows):
            columns += [("In sizes", False, [str(size) for size in self.in_sizes])]
            columns += [("Out sizes", False, [str(size) for size in self.out_sizes])]
        return columns

    def totals(self) -> list[str]:
        """Return the lines below the table."""
        lines = [
            f"{count(self.total_params)} parameters, {count(self.trainable_params)} trainable, "
            f"{count(self.frozen_params)} frozen; {self.size_mb:,.3f} MB"
        ]
        if self.has_lazy:
            lines.append("Some parameters have no shape before the first batch and are not counted.")
        if self.has_absent:
            lines.append("This is this rank's stage of the model only; the other parts are on other ranks.")
        return lines

    def __str__(self) -> str:
        columns = self.columns()
        padded = []
        for title, is_number, texts in columns:
            width = max(len(text) for text in (title, *texts))
            padded.append([text.rjust(width) if is_number else text.ljust(width) for text in (title, *texts)])
        text = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
        text.insert(1, "-" * max(map(len, text)))
        return "\n".join([*(text if self.rows else []), *self.totals()])


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Count a module's parameters.

    Args:
        module: any module; parameters may be on the meta device, or sharded (the whole is counted). With an
            `example_input_array` (a tensor, the list of `forward`'s arguments, or a dict of them) it runs once, in
            eval mode, for the sizes of inputs and outputs.
        max_depth: rows for the modules down to this depth: 1 the children, 0 none, -1 all.

    Returns:
        The rows and the totals.

    Raises:
        SettingError: `max_depth` is below -1.

    Example:
        >>> summarize(nn.Linear(3, 2)).total_params
        8
    """
    _DEPTH("max_depth", max_depth)
    rows: list[SummaryRow] = []
    absent = {part for part in module.modules() if hasattr(part, "_absent_name")}
    shown = {
        name: child
        for name, child in module.named_modules()
        if name and child not in absent and (max_depth == -1 or name.count(".") < max_depth)
    }
    lazy = any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
    sizes = {} if absent or lazy else _sizes(module, shown)
    for name, child in shown.items():
        params = [(parameter, _elements(parameter)) for parameter in child.parameters()]
        rows.append(
            SummaryRow(
                name=name,
                type=type(child).__name__,
                params=sum(elements for _, elements in params),
                trainable=sum(elements for parameter, elements in params if parameter.requires_grad),
                mode="train" if child.training else "eval",
                in_size=sizes.get(name, (None, None))[0],
                out_size=sizes.get(name, (None, None))[1],
            )
        )
    params = [(parameter, _elements(parameter)) for parameter in module.parameters()]
    return Summary(
        rows=tuple(rows),
        total_params=sum(elements for _, elements in params),
        trainable_params=sum(elements for parameter, elements in params if parameter.requires_grad),
        params_bytes=sum(_bytes(parameter) for parameter in module.parameters()),
        buffers_bytes=sum(_bytes(buffer) for buffer in module.buffers()),
        has_lazy=lazy,
        has_absent=bool(absent),
    )


def _sizes(module: nn.Module, shown: dict[str, nn.Module]) -> dict[str, tuple[Any, Any]]:
    """Return the sizes of what goes in and out of each module when the whole runs on its example; none without one."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return {}
    sizes: dict[str, tuple[Any, Any]] = {}
    hooks = []
    for name, child in shown.items():

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name) -> None:
            given = (*args, *kwargs.values())
            sizes.setdefault(name, (_shape(given[0] if len(given) == 1 else given), _shape(output)))

        if not isinstance(child, torch.jit.ScriptModule):  # those take no such hooks
            hooks.append(child.register_forward_hook(note, with_kwargs=True))
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is not None:
        example = send_to_device(example, first.device)
        if first.dtype in (torch.float16, torch.bfloat16):
            example = map_leaves(lambda leaf: _as(leaf, first.dtype), example)
    modes = {part: part.training for part in module.modules()}
    run = module._call_impl  # compiled or not: the compiler would need its time for this one run
    try:
        module.eval()
        with torch.no_grad(), isolate_rng():  # a run with a summary is the run without one
            if isinstance(example, dict):
                run(**example)
            else:
                run(*(example if isinstance(example, list | tuple) else (example,)))
    finally:
        for part, training in modes.items():
            part.training = training
        for hook in hooks:
            hook.remove()
    return sizes


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _shape(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_shape(part) for part in data]
    return list(data.shape) if hasattr(data, "shape") else UNKNOWN_SIZE


class ModelSummary(Callback):
    """Print a table of the model's parts before training: parameters, trainable ones, size.

    A rich table on a terminal, plain text elsewhere; on global rank 0 only.

    Args:
        max_depth: rows for the modules down to this depth: 1 the children, 0 totals only, -1 all.

    Raises:
        SettingError: `max_depth` is below -1.

    Example:
        >>> ModelSummary(max_depth=2).state_key
        'ModelSummary'
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = _DEPTH("max_depth", max_depth)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Counted on every rank: a sharded module may gather to tell its size.
        summary = summarize(module, self.max_depth)
        if not trainer.is_global_zero:
            return
        if sys.stdout.isatty() and summary.rows:
            _print_rich(summary)
        else:
            trainer.print(str(summary))


def _print_rich(summary: Summary) -> None:
    from rich.console import Console  # slow to import, and only needed on a terminal
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    columns = summary.columns()
    for title, is_number, _ in columns:
        style = {"": "dim", "Type": "green", "Name": None}.get(title, None if is_number else "dim")
        table.add_column(title, justify="right" if is_number else "left", style=style, no_wrap=title == "Name")
    for line in zip(*(texts for _, _, texts in columns), strict=True):
        table.add_row(*line)
    console = Console()
    console.print(table)
    for line in summary.totals():
        console.print(line, highlight=False)


def count(number: int) -> str:
    """Write a count for people: 950, 1.3 K, 124 M.

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
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel()


def _bytes(tensor: torch.Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel() * tensor.element_size()
