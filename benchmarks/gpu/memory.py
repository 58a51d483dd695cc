"""What saves memory on a device, and what it costs: the rows of the part `memory`. All train GPT-2 by the Trainer.

- `recomputation`: activations that are computed again in the backward, of all blocks, of each second one, and of cheap
  operations alone; and by a budget of the compiler.
- `loss`: the loss over a large vocabulary without all logits.
- `muon`: `WholeMatrix(Muon)` for the matrices of the blocks beside AdamW, and beside torch's Muon.

Each has tokens per second and the highest memory of every way, in fits of their own, in turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from models import GPT2, GPT2_124M, TINY, Language
from row import Answer, Place
from speed import Timed, in_turns, median_ratio
from torch import Tensor

from instep import Trainer
from instep.activations import ActivationCheckpointing
from instep.losses import linear_cross_entropy
from instep.optim import WholeMatrix

OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Seen(Timed):
    """Batches as before, and the highest memory from batch `first` on.

    Attributes:
        peak: in bytes.
        losses: of the fit's steps, on the device until they are read.
    """

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.peak, self.losses = 0, list[Tensor]()

    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index == self.first:
                self.place.reset_peak_memory()
            yield batch
        self.peak = self.place.peak_memory()


class Kept(Language):
    """A GPT-2 whose losses are kept.

    Args:
        seen: where they go.
        optimizer: makes the optimizers of the net; None: AdamW.
        words: of `Language`.
    """

    def __init__(self, *words: Any, seen: Seen, optimizer: Callable[[GPT2], Any] | None = None) -> None:
        super().__init__(*words)
        self.seen, self.made_by = seen, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.made_by is None else self.made_by(self.net)


class Short(GPT2):
    """The same net and loss, by `linear_cross_entropy`."""

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.embedding.weight, targets)


def recomputation(place: Place) -> Answer:
    """Measure recomputed activations."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "all blocks": {"callbacks": [ActivationCheckpointing("Block")]},
        "each second block": {"callbacks": [ActivationCheckpointing("Block", every=2)]},
        "cheap operations": {"callbacks": [ActivationCheckpointing("Block", save="ops")]},
    }
    if place.rehearses:
        place.stand_in("the compiler's budget: left out")
    else:
        ways |= {
            "compiled": {"compile": True},
            "compiled, a budget of 0.5": {
                "compile": True,
                "callbacks": [ActivationCheckpointing(memory_budget=0.5)],
            },
        }
    answer, peaks = _measured(place, {name: (GPT2, settings, None) for name, settings in ways.items()})
    if not place.rehearses:
        less = all(peaks[name] < peaks["plain"] for name in [*ways][1:4])
        answer.check("recomputation takes less memory", less, peaks)
        budget = peaks["compiled, a budget of 0.5"] < peaks["compiled"]
        answer.check("the compiler's budget takes less memory", budget, peaks)
    return answer


def loss(place: Place) -> Answer:
    """Measure the loss without all logits."""
    answer, peaks = _measured(place, {"plain": (GPT2, {}, None), "without all logits": (Short, {}, None)})
    if not place.rehearses:
        answer.check("the loss takes less memory", peaks["without all logits"] < peaks["plain"], peaks)
    return answer


def muon(place: Place) -> Answer:
    """Measure Muon for the matrices of the blocks."""

    def by_muon(whole: bool) -> Callable[[GPT2], Any]:
        def optimizers(net: GPT2) -> list[Any]:
            matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
            ids = set(map(id, matrices))
            made = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
            rest = torch.optim.AdamW([p for p in net.parameters() if id(p) not in ids], lr=3e-4)
            return [WholeMatrix(made) if whole else made, rest]

        return optimizers

    ways = {
        "AdamW": (GPT2, {}, None),
        "torch's Muon": (GPT2, {}, by_muon(whole=False)),
        "WholeMatrix(Muon)": (GPT2, {}, by_muon(whole=True)),
    }
    answer, _ = _measured(place, ways, alike=("torch's Muon", "WholeMatrix(Muon)"))
    return answer


def _measured(
    place: Place, ways: dict[str, tuple[type[GPT2], dict[str, Any], Any]], alike: tuple[str, ...] = ()
) -> tuple[Answer, dict[str, int]]:
    """Train in each way in turns.

    Args:
        place: where.
        ways: class of the net, settings of the Trainer, and what makes the optimizers, by name; the first one is what
            the others are set beside.
        alike: ways whose losses have to be those of the first of them; without any, all.
    """
    answer = Answer()
    shape, batch_size, count, first, rounds = (TINY, 2, 4, 1, 1) if place.rehearses else (GPT2_124M, 16, 22, 6, 2)
    start = GPT2(*shape)
    batch, tokens = start.texts(batch_size, place.device), batch_size * start.tokens
    fits: dict[str, list[Seen]] = {name: [] for name in ways}
    if place.rehearses:
        place.stand_in("memory statistics: 0")

    def trained(name: str) -> Seen:
        kind, settings, optimizer = ways[name]
        net = kind(*shape)
        net.load_state_dict(copy.deepcopy(start.state_dict()))
        fits[name].append(Seen(batch, count, first, place))
        module = Kept(net.to(place.device), place.device, seen=fits[name][-1], optimizer=optimizer)
        Trainer(
            accelerator=place.device, devices=1, precision="bf16-mixed", max_epochs=1, default_root_dir=place.folder,
            **OFF, **settings
        ).fit(module, fits[name][-1])  # fmt: skip
        return fits[name][-1]

    found = in_turns({name: lambda name=name: trained(name) for name in ways}, rounds, answer)
    beside, *others = ways
    peaks = {name: max(fit.peak for fit in all_of) for name, all_of in fits.items()}
    losses = {name: torch.stack(all_of[0].losses).float().cpu() for name, all_of in fits.items()}
    answer.figures |= {
        "tokens per second": {name: round(statistics.median(values) * tokens) for name, values in found.items()},
        f"tokens per second over those of {beside}": {
            name: round(median_ratio(found[name], found[beside]), 4) for name in others
        },
        "peak memory, GB": {name: round(peak / 1e9, 3) for name, peak in peaks.items()},
        "last loss": {name: round(float(values[-1]), 4) for name, values in losses.items()},
        "fits, steps per second": {name: [round(one, 2) for one in values] for name, values in found.items()},
    }
    like, *rest = alike or ways
    for name in rest:
        apart = float((losses[name] - losses[like]).abs().max())
        answer.check(f"{name}: losses are those of {like}, in bf16", apart < 0.02, f"{apart:.2g} apart")
    return answer, peaks
