"""Precision: losses of a small GPT beside float32's, what the gradient scaler leaves out, and resuming bit for bit.

All runs use deterministic algorithms, so that two of them differ by their precision alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import GPT2, TINY, Language, adamw
from row import Answer, Place
from torch import Tensor
from torch.utils.data import DataLoader

from instep import Trainer
from instep.callbacks import Callback
from instep.distributed.nested import iter_leaves

SMALL = (4, 256, 4, 128, 512)
BATCH, STEPS, LAST = 32, 300, 50
SHOWN = (1, 10, 25, 50, 100, 150, 200, 250, 300)
SCALER = {"scale": 2.0**30, "growth_interval": 5}  # Far too large at first, and soon again: steps are left out.
SCALER_OF_REHEARSAL = {"scale": 2.0**21, "growth_interval": 2}


def bf16_mixed(place: Place) -> Answer:
    """Autocast to bfloat16."""
    return beside_float32(place, "bf16-mixed", 0.02)


def float16(place: Place) -> Answer:
    """Autocast to float16; also with a gradient scaler whose factor overflows again and again."""
    with ExitStack() as stack:
        if place.rehearses:
            place.stand_in("float16 on a CPU, where instep refuses it")
            for module in ("instep.strategies.precision", "instep.trainer.settings"):
                stack.enter_context(patch(f"{module}.check_device"))
        answer = beside_float32(place, "16-mixed", 0.02)
        ours = train(place, "16-mixed", steps(place), overflows=True)
        hand, left_out = by_hand(place)
    answer.figures["steps left out"] = {"Trainer": ours.left_out, "handwritten": left_out}
    difference = max(abs(a - b) for a, b in zip(ours.losses, hand, strict=True))
    answer.figures["largest difference to the handwritten losses"] = difference
    answer.check("some steps were left out, and some were not", 0 < len(left_out) < len(hand), len(left_out))
    answer.check("the Trainer left out the steps that the handwritten loop did", ours.left_out == left_out)
    answer.check("its losses are those of the handwritten loop", difference < 1e-3, difference)
    return answer


def bf16_true(place: Place) -> Answer:
    """Weights and arithmetic in bfloat16."""
    return beside_float32(place, "bf16-true", 0.15)


def fp8(place: Place) -> Answer:
    """Inner linear layers in float8, by torchao."""
    if find_spec("torchao") is None:
        place.leave_out("torchao is not installed")
    if place.rehearses:
        place.stand_in("float8 emulated in wider numbers")
    elif torch.cuda.get_device_capability() < (8, 9):
        place.leave_out(f"{place.name()} has no float8")
    return beside_float32(place, "fp8", 0.05)


# ---- runs


@dataclass
class Trained:
    """What a run left: losses by step, the steps left out (from 1), and all state by name."""

    losses: list[float]
    left_out: list[int]
    state: dict[str, Any]


class Watch(Callback):
    """Keep the losses on the device, and save once.

    Args:
        save_at: the step after which the run is saved; 0 for never.
        path: where to.
        scaler: what the gradient scaler begins with, beside its defaults.
    """

    def __init__(self, save_at: int, path: Path, scaler: dict[str, float]) -> None:
        self.save_at, self.path, self.scaler = save_at, path, scaler
        self.losses: list[Tensor] = []
        self.left_out: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Set the gradient scaler's factor; a resumed run has it from its checkpoint."""
        precision = trainer.strategy.precision
        if self.scaler and trainer.global_step == 0:
            precision.load_state_dict({**precision.state_dict(), **self.scaler})

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss, and the step where it was left out; save once."""
        self.losses.append(outputs["loss"])
        if trainer.strategy.gradients.step_was_skipped:
            self.left_out.append(trainer.global_step)
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def train(
    place: Place, precision: str, count: int, save_at: int = 0, resumed: Path | None = None, overflows: bool = False
) -> Trained:
    """Train the small GPT for so many steps in all."""
    watch = Watch(save_at, place.folder / f"{precision}-{save_at}", scaler(place) if overflows else {})
    module = Language(GPT2(*size(place)), place.device)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator=place.device,
        devices=1,
        precision=precision,
        max_steps=count,
        deterministic=True,
        callbacks=[watch],
        default_root_dir=place.folder,
        **dict.fromkeys(off, False),
    )
    trainer.fit(module, loader(place), ckpt_path=resumed)
    optimizer = trainer.optimizers[0].state_dict()
    state = {"weights": module.state_dict(), "optimizer": optimizer, "scaler": trainer.strategy.precision.state_dict()}
    losses = torch.stack(watch.losses).tolist()
    return Trained(losses, watch.left_out, flat(state))


def by_hand(place: Place) -> tuple[list[float], list[int]]:
    """Train the small GPT by a handwritten loop in float16; return the losses, and the steps left out."""
    net = GPT2(*size(place)).to(place.device)
    optimizer = adamw(net, place.device)
    begin, every = scaler(place).values()
    scales = torch.amp.GradScaler(place.device, init_scale=begin, growth_interval=int(every))
    losses: list[Tensor] = []
    left_out: list[int] = []
    with repeatable():
        for batch in loader(place):
            optimizer.zero_grad()
            with torch.autocast(place.device, dtype=torch.float16):
                loss = net(batch.to(place.device))
            before = scales.get_scale()
            scales.scale(loss).backward()
            scales.step(optimizer)
            scales.update()
            losses.append(loss.detach())
            if scales.get_scale() < before:
                left_out.append(len(losses))
    return torch.stack(losses).tolist(), left_out


def beside_float32(place: Place, precision: str, most: float) -> Answer:
    """Compare a precision's losses with those of float32, and resume in the middle."""
    answer, count = Answer(), steps(place)
    exact, ours = train(place, "32-true", count), train(place, precision, count)
    last = LAST if count > LAST else 2
    means = [sum(run.losses[-last:]) / last for run in (exact, ours)]
    answer.figures["losses"] = {
        name: {step: round(run.losses[step - 1], 4) for step in SHOWN if step <= count}
        for name, run in (("32-true", exact), (precision, ours))
    }
    answer.figures[f"mean of the last {last}"] = {"32-true": round(means[0], 4), precision: round(means[1], 4)}
    answer.bar(
        f"{precision}: mean of the last {last} losses off float32's", abs(means[1] - means[0]), most, least=False
    )
    answer.check("every loss is finite", all(map(math.isfinite, ours.losses)))
    answer.check("it learns", means[1] < ours.losses[0], f"{ours.losses[0]:.4f} to {means[1]:.4f}")
    answer.check("it computes otherwise than float32", ours.losses != exact.losses)
    resumes(place, precision, answer)
    return answer


def resumes(place: Place, precision: str, answer: Answer) -> None:
    """Check that a run that was saved in the middle ends with the bits of the run that went on."""
    count = min(20, steps(place))
    whole = train(place, precision, count, save_at=count // 2, overflows=precision == "16-mixed")
    resumed = train(place, precision, count, resumed=place.folder / f"{precision}-{count // 2}")
    differ = [
        name
        for name, value in whole.state.items()
        if not (torch.equal(value, resumed.state[name]) if isinstance(value, Tensor) else value == resumed.state[name])
    ]
    same = not differ and whole.state.keys() == resumed.state.keys()
    answer.check(f"{precision} resumes bit for bit", same, f"{len(differ)} of {len(whole.state)} differ: {differ[:5]}")
    tail = whole.losses[count // 2 :]
    answer.check("its losses are the same after it", resumed.losses == tail, f"{resumed.losses[:3]}, {tail[:3]}")


# ---- sizes and data


def size(place: Place) -> tuple[int, int, int, int, int]:
    """Return the GPT's size."""
    return TINY if place.rehearses else SMALL


def steps(place: Place) -> int:
    """Return the number of steps of a whole run."""
    return 6 if place.rehearses else STEPS


def scaler(place: Place) -> dict[str, float]:
    """Return what a gradient scaler begins with that leaves steps out."""
    return SCALER_OF_REHEARSAL if place.rehearses else SCALER


def loader(place: Place) -> DataLoader[Any]:
    """Return the batches of one epoch: of ten tokens nine follow from the one before, by a fixed rule.

    A rehearsal's batches are all the same, so that its few steps learn something.
    """
    *_, tokens, vocabulary = size(place)
    batch = 4 if place.rehearses else BATCH
    drawn = torch.Generator().manual_seed(0)
    follows = torch.randperm(vocabulary, generator=drawn)
    text = torch.randint(0, vocabulary, (batch * steps(place), tokens + 1), generator=drawn)
    for at in range(tokens):
        known = torch.rand(len(text), generator=drawn) < 0.9
        text[known, at + 1] = follows[text[known, at]]
    if place.rehearses:
        text = text[:batch].repeat(steps(place), 1)
    return DataLoader(text, batch)  # pyright: ignore[reportArgumentType]


def flat(state: Any) -> dict[str, Any]:
    """Return the tensors and values of a nested state, on the CPU, by their paths."""
    return {
        name: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf for name, leaf in iter_leaves(state)
    }


@contextmanager
def repeatable() -> Iterator[None]:
    """Use deterministic algorithms inside, as the Trainer does."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
