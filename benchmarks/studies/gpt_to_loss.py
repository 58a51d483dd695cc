"""Seconds until a small GPT reaches a validation loss: the Trainer beside a handwritten loop, eager and compiled.

    python benchmarks/studies/gpt_to_loss.py           # about 11 minutes
    python benchmarks/studies/gpt_to_loss.py --quick   # a few steps

The model and the text of `examples/stdlib_gpt.py`, without dropout, in the same order; AdamW (foreach), a constant
rate, validation every 50 steps. The losses of both loops have the same bits, so both reach any loss at the same step,
and what differs is the time. Each pair is two fresh processes on the same CPU that take turns of 50 steps and a
validation (see `harness.take_turns`). The time counts from step 75 on, when everything is compiled and warm; what comes
before, imports excluded, is `start_s`, and the compiled run's less the eager one's is what compiling takes.

`seconds` is what a loop needs from step 75 to the target: 4 bits per byte, or the loss at its end. The bars: 1.01 times
the handwritten loop, or within the noise (the loop against itself); compiled 1.02 times the compiled one. On a CPU,
compiling gains nothing at this size.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import harness

STEPS_PER_TURN, FIRST = 50, 75  # a turn begins and ends halfway between two validations
TARGET_BITS = 4.0
BARS = {"eager": 1.01, "compiled": 1.02}
COMPILED: dict[str, Any] = {"dynamic": False}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: one run, in turns."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import stdlib_gpt as gpt  # late: the parent needs none of it  # pyright: ignore[reportMissingImports]
    import torch
    import workload
    from torch.utils.data import DataLoader, Subset

    torch.set_num_threads(1)
    turns = request["turns"]
    steps = FIRST + STEPS_PER_TURN * turns + 1
    train, val = map(gpt.Windows, gpt.read_stdlib())
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: steps * gpt.GLOBAL_BATCH].tolist()
    clock = workload.Clock(range(FIRST, steps, STEPS_PER_TURN), workload.pause)
    batches = DataLoader(Subset(train, order), gpt.GLOBAL_BATCH, collate_fn=clock.collate)
    checks = DataLoader(Subset(val, range(64 if request["quick"] else 256)), 64)
    torch.manual_seed(1)
    model = gpt.StdlibGPT(dropout=0.0)
    start = time.perf_counter()
    losses = (by_hand if request["loop"] == "handwritten" else by_trainer)(model, batches, checks, request["compiled"])
    notes = clock.all_notes()
    return {
        "start_s": notes[0][0][0] / 1e9 - start,
        "turns_s": [(stop - begin) / 1e9 for (_, (begin, _)), ((stop, _), _) in pairwise(notes)],
        "bits": losses,
    }


def optimizer_of(model: Any) -> Any:
    """The same for both."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def by_hand(model: Any, batches: Any, checks: Any, compiled: bool) -> list[float]:
    """The tuned loop; its validation losses in bits per byte."""
    import torch

    run = torch.compile(model, **COMPILED) if compiled else model
    optimizer = optimizer_of(model)
    losses = []
    for index, (text, target) in enumerate(batches):
        loss = model.pipeline_loss(run(text), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (index + 1) % STEPS_PER_TURN == 0:
            model.eval()
            with torch.no_grad():
                found = [float(model.pipeline_loss(run(text), target)) for text, target in checks]
            model.train()
            losses.append(statistics.fmean(found) / math.log(2))
    return losses


def by_trainer(model: Any, batches: Any, checks: Any, compiled: bool) -> list[float]:
    """The Trainer; its validation losses in bits per byte."""
    from instep import Callback, Trainer

    losses: list[float] = []

    class Keep(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            losses.append(float(trainer.callback_metrics["val_bits_per_byte"]))

    model.configure_optimizers = lambda: optimizer_of(model)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        val_check_interval=STEPS_PER_TURN,
        num_sanity_val_steps=0,
        inference_mode=False,  # so that one compiled graph serves as in the handwritten loop
        compile=COMPILED if compiled else None,
        logger=False,
        callbacks=[Keep()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches, checks)
    return losses


def pair(loop: str, compiled: bool, turns: int, quick: bool) -> dict[str, float]:
    """The handwritten loop and another in turns: what each took to the target, and to start."""
    asked = {"compiled": compiled, "quick": quick}
    base, own = harness.take_turns(
        __file__, {**asked, "loop": "handwritten", "turns": turns + 1}, {**asked, "loop": loop, "turns": turns}, turns
    )
    common = min(len(base["bits"]), len(own["bits"]))
    if any(abs(a - b) > 1e-6 for a, b in zip(base["bits"][:common], own["bits"][:common], strict=True)):
        raise RuntimeError(f"the loops differ: {base['bits']} and {own['bits']}")
    # Validation k comes after step 50 k; turn k holds validation k + 2.
    reached = next((k for k, bits in enumerate(own["bits"][1 : turns + 1]) if bits <= TARGET_BITS), turns - 1) + 1
    around = [(before + after) / 2 for before, after in pairwise(base["turns_s"])]
    return {
        "ratio": statistics.median(mine / hand for mine, hand in zip(own["turns_s"], around, strict=True)),
        "seconds": sum(own["turns_s"][:reached]),
        "handwritten_s": sum(around[:reached]),
        "start_s": own["start_s"],
        "handwritten_start_s": base["start_s"],
        "bits": own["bits"][min(reached, len(own["bits"]) - 1)],
        "steps": FIRST + STEPS_PER_TURN * reached,
    }


def main() -> None:
    """Run all pairs, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Seconds until a small GPT reaches a validation loss.")
    parser.add_argument("--quick", action="store_true", help="one pair of two turns each, eager only")
    parser.add_argument("--pairs", type=int, default=3, help="of each kind (default: 3)")
    parser.add_argument("--turns", type=int, default=4, help="of 50 steps (default: 4)")
    harness.add_out(parser)
    args = parser.parse_args()
    pairs, turns = (1, min(2, args.turns)) if args.quick else (args.pairs, args.turns)
    kinds = [("eager", "handwritten"), ("eager", "trainer")]
    if not args.quick:
        kinds += [("compiled", "handwritten"), ("compiled", "trainer")]
    found: dict[tuple[str, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
    progress = harness.Progress(pairs * len(kinds))
    for _ in range(pairs):
        for kind in kinds:
            found[kind].append(pair(kind[1], kind[0] == "compiled", turns, args.quick))
            progress.step(f"{kind[0]} {kind[1]}: {found[kind][-1]['ratio']:.3f}")
    results = [
        {
            "mode": mode,
            "loop": loop,
            "bar": BARS[mode],
            **{key: harness.spread([p[key] for p in done], 4) for key in done[0]},
        }
        for (mode, loop), done in found.items()
    ]
    columns = ("handwritten_s", "seconds", "ratio", "start_s", "bits")
    rows = [
        (
            r["mode"],
            "noise" if r["loop"] == "handwritten" else "Trainer",
            *(f"{r[key]['median']:.3f}" for key in columns),
        )
        for r in results
    ]
    harness.print_table(("", "", "handwritten s", "own s", "ratio", "start s", "bits per byte"), rows)
    setting = {"target_bits": TARGET_BITS, "turns": turns, "pairs": pairs}
    harness.write_results(args.out, f"gpt_to_loss{'_quick' if args.quick else ''}", {**setting, "results": results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        main()
