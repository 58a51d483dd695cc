"""A table of the model's parts and their sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from instep.callbacks.base import Callback
from instep.utils.checks import at_least

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_MB = 1_000_000
_DEPTH = at_least(-1, "-1 for all, 0 for totals only")


@dataclass(frozen=True)
class SummaryRow:
    """One module: its dotted name, class, parameters (elements), those that are trained, and its mode."""

    name: str
    type: str
    params: int
    trainable: int
    mode: str


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
        cells = [("", "Name", "Type", "Params", "Trainable", "Mode")]
        cells += [
            (str(number), row.name, row.type, count(row.params), count(row.trainable), row.mode)
            for number, row in enumerate(self.rows)
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(6)]
        text = [
            "  ".join(
                cell.rjust(width) if column in (3, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        text.insert(1, "-" * max(map(len, text)))
        return "\n".join([*(text if self.rows else []), *self.totals()])


def summarize(module: nn.Module, max_depth: int = 1) -> Summary:
    """Count a module's parameters.

    Args:
        module: any module; parameters may be on the meta device, or sharded (the whole is counted).
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
    for name, child in module.named_modules():
        if name and child not in absent and (max_depth == -1 or name.count(".") < max_depth):
            params = [(parameter, _elements(parameter)) for parameter in child.parameters()]
            rows.append(
                SummaryRow(
                    name=name,
                    type=type(child).__name__,
                    params=sum(elements for _, elements in params),
                    trainable=sum(elements for parameter, elements in params if parameter.requires_grad),
                    mode="train" if child.training else "eval",
                )
            )
    params = [(parameter, _elements(parameter)) for parameter in module.parameters()]
    return Summary(
        rows=tuple(rows),
        total_params=sum(elements for _, elements in params),
        trainable_params=sum(elements for parameter, elements in params if parameter.requires_grad),
        params_bytes=sum(_bytes(parameter) for parameter in module.parameters()),
        buffers_bytes=sum(_bytes(buffer) for buffer in module.buffers()),
        has_lazy=any(nn.parameter.is_lazy(parameter) for parameter, _ in params),
        has_absent=bool(absent),
    )


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
    table.add_column("", style="dim")
    table.add_column("Name", no_wrap=True)
    table.add_column("Type", style="green")
    table.add_column("Params", justify="right")
    table.add_column("Trainable", justify="right")
    table.add_column("Mode", style="dim")
    for number, row in enumerate(summary.rows):
        table.add_row(str(number), row.name, row.type, count(row.params), count(row.trainable), row.mode)
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
