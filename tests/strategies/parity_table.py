"""Every strategy on the same model, and every checkpoint under every other strategy; keeps both tables.

    python -m tests.strategies.parity_table             # writes docs/scale/parity.md
    python -m tests.strategies.parity_table --muon      # measures its section about Muon alone again
    python -m tests.strategies.parity_table --memory    # measures its section about memory alone again

`test_parity.py` runs the first steps of the first table and a part of the second. XLA has torch and an environment of
its own (`make venv-xla`), in which this file runs a second time, with `--xla`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.activations import ActivationCheckpointing
from instep.callbacks import Callback
from instep.losses import linear_cross_entropy
from instep.strategies import FSDPStrategy, Strategy
from tests.helpers.spawn import run_command, run_ranks
from tests.strategies.tiny_gpt import GLOBAL_BATCH, STEPS, MuonGPT, TinyGPT, train

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "scale" / "parity.md"
THOUSAND = ROOT / "benchmarks" / "results" / "muon_thousand.json"
LIMIT = 1e-5
SAVED, RESUMED = 3, 3  # steps before a checkpoint, and steps after it that are compared
XLA = "XLA x1"
XLA_SETTINGS: dict[str, Any] = {"strategy": "xla", "accelerator": "xla", "batch_size": 8, "limit_val_batches": 0}


def mesh(**sizes: int) -> Callable[[], Strategy]:
    def make() -> Strategy:
        from instep.strategies import MeshStrategy  # late: only ranks that cut up pay for it

        return MeshStrategy(**sizes)

    return make


@dataclass(frozen=True)
class Case:
    """One way to train `TinyGPT`.

    Args:
        name: in the tables.
        strategy: a name, or what makes one.
        ranks: processes.
        data_ranks: into how many parts the data is cut.
        package: what must be installed.
        harmless: the warning that it gives here.
    """

    name: str
    strategy: str | Callable[[], Strategy]
    ranks: int = 2
    data_ranks: int = 2
    package: str = ""
    harmless: str = ""

    @property
    def missing(self) -> bool:
        return bool(self.package) and importlib.util.find_spec(self.package) is None

    def settings(self) -> dict[str, Any]:
        """Arguments of `train`: a window of two micro-batches whatever the number of processes."""
        strategy = self.strategy if isinstance(self.strategy, str) else self.strategy()
        return {
            "strategy": strategy,
            "batch_size": GLOBAL_BATCH // self.data_ranks // 2,
            "harmless": self.harmless,
            "limit_val_batches": 0,
        }


CASES = {
    case.name: case
    for case in (
        Case("single process", "single_device", 1, 1),
        Case("DP", "dp", 1, 1, harmless="strategy='dp' has one device here"),
        Case("DDP x2", "ddp"),
        Case("DDP x4", "ddp", 4, 4),
        Case("FSDP x2", "fsdp"),
        Case("FSDP + CPU offload x2", lambda: FSDPStrategy(cpu_offload=True)),
        Case("HSDP 2x2", lambda: FSDPStrategy(dp_replicate=2), 4, 4),
        Case("TP x2", mesh(tp=2), 2, 1),
        Case("TP x2, FSDP x2", mesh(tp=2, dp_shard=2), 4, 2),
        Case("CP x2", mesh(cp=2), 2, 1),
        Case("PP x2 (1F1B)", mesh(pp=2), 2, 1),
        Case("PP x2, FSDP x2", mesh(pp=2, dp_shard=2), 4, 2),
        Case("DeepSpeed 1 x2", "deepspeed_stage_1", package="deepspeed"),
        Case("DeepSpeed 2 x2", "deepspeed_stage_2", package="deepspeed"),
        Case("DeepSpeed 3 x2", "deepspeed_stage_3", package="deepspeed"),
    )
}
MEMORY = ("single process", "DDP x2", "FSDP x2", "HSDP 2x2", "TP x2")
SAVERS = {"recomputed": "activation checkpointing", "chunked": "chunked loss"}
MUON = ("single process", "DDP x2", "FSDP x2", "DDP x4", "HSDP 2x2", "TP x2", "TP x2, FSDP x2")


# ---- in the ranks


def checkpoint(folder: str, name: str) -> Path:
    """Where a case saves."""
    return Path(folder, f"case-{[*CASES, XLA, *SAVERS, *(f'muon {name}' for name in MUON)].index(name)}")


class Saves(Callback):
    """One checkpoint, after `SAVED` steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED and trainer.position.batch == trainer.position.window_batch:
            trainer.save_checkpoint(self.path)


def settings(name: str) -> dict[str, Any]:
    """Arguments of `train`."""
    return XLA_SETTINGS if name == XLA else CASES[name].settings()


def losses_of(names: Iterable[str], folder: str, steps: int = STEPS) -> dict[str, list[float]]:
    """The losses of each case, one after the other in the same processes; checkpoints are left in a folder."""
    return {
        name: train(steps=steps, callbacks=[Saves(checkpoint(folder, name))], **settings(name)).losses for name in names
    }


def load(names: Iterable[str], sources: Iterable[str], folder: str) -> dict[tuple[str, str], list[float]]:
    """What each case goes on with from each checkpoint: (saved by, loaded by) -> losses."""
    losses = {}
    for name in names:
        for source in sources:
            torch.manual_seed(5)  # other weights than the checkpoint's
            path = checkpoint(folder, source)
            run = train(steps=SAVED + RESUMED, module=TinyGPT(), ckpt_path=path, **settings(name))
            losses[source, name] = run.losses
    return losses


def muon_losses(names: Iterable[str], folder: str, steps: int = STEPS) -> dict[Any, list[float]]:
    """The losses of each case with Muon, unclipped, and what each goes on with from the checkpoint of the first."""
    names, found = list(names), dict[Any, list[float]]()
    how: dict[str, Any] = {"gradient_clip_val": None}
    for name in names:
        torch.manual_seed(1)
        path = checkpoint(folder, f"muon {name}")
        found[name] = train(steps=steps, module=MuonGPT(), callbacks=[Saves(path)], **how, **settings(name)).losses
    for name in names:
        torch.manual_seed(5)
        path = checkpoint(folder, f"muon {names[0]}")
        run = train(steps=SAVED + RESUMED, module=MuonGPT(), ckpt_path=path, **how, **settings(name))
        found[names[0], name] = run.losses
    return found


class ChunkedGPT(TinyGPT):
    """The same with a loss that never holds all logits."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(self.norm(x), self.head.weight, batch[1], chunk_tokens=24)


def memory_losses(names: Iterable[str], folder: str, steps: int = STEPS) -> dict[tuple[str, str, str], list[float]]:
    """The losses of each case with less memory, and those after the checkpoint of the case of one process."""
    found = dict[tuple[str, str, str], list[float]]()
    for way in SAVERS:
        for name in names:

            def run(steps: int, seed: int, path: Any = None, *, way: str = way, name: str = name) -> list[float]:
                torch.manual_seed(seed)
                module = ChunkedGPT() if way == "chunked" else TinyGPT()
                more: list[Callback] = [ActivationCheckpointing()] if way == "recomputed" else []
                if path is None and CASES[name].ranks == 1:
                    more.append(Saves(checkpoint(folder, way)))
                how = {**settings(name), "module": module, "callbacks": more, "ckpt_path": path}
                return train(steps=steps, **how).losses

            found[way, name, "whole"] = run(steps, 1)
            found[way, name, "resumed"] = run(SAVED + RESUMED, 5, checkpoint(folder, way))
    return found


def answer_for_xla(folder: str, *sources: str) -> None:
    """In XLA's environment: its losses, and those after each case's checkpoint, as JSON."""
    losses = losses_of([XLA], folder)[XLA]
    loaded = {source: values for (source, _), values in load([XLA], [*sources, XLA], folder).items()}
    print(json.dumps({"losses": losses, "loaded": loaded}))


# ---- here


def by_ranks(names: Iterable[str], fn: Callable[..., dict[Any, Any]], *args: Any) -> dict[Any, Any]:
    """Run cases in as few processes as they can share; the first rank's result, after all ranks said the same."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        groups.setdefault((CASES[name].ranks, CASES[name].package), []).append(name)
    found: dict[Any, Any] = {}
    for (ranks, _), group in groups.items():
        first, *others = run_ranks(fn, ranks, group, *args, timeout_s=3500.0)
        assert all(other == first for other in others), "ranks report different losses"
        found |= first
    return found


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest one; infinite where steps are missing or a loss is nan."""
    if len(losses) != len(expected) or any(loss != loss for loss in losses):
        return float("inf")
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def after_saving(losses: list[float]) -> list[float]:
    """Those of the steps that a loaded checkpoint is compared in."""
    return losses[SAVED : SAVED + RESUMED]


def same_bits(name: str, losses: dict[str, list[float]]) -> str:
    """The first case before this one with exactly its losses, if any."""
    first = next(other for other in losses if losses[other] == losses[name])
    return "" if first == name else first


def parity_rows(losses: dict[str, list[float]]) -> list[str]:
    """The first table: how far each case's losses are from the single process's."""
    alone = losses["single process"]
    rows = ["| strategy | largest difference | bit-equal to |", "|---|---|---|"]
    for name in (*CASES, XLA):
        if name in losses:
            rows.append(f"| {name} | {difference(losses[name], alone):.1e} | {same_bits(name, losses)} |")
        else:
            missing = "XLA's environment" if name == XLA else CASES[name].package
            rows.append(f"| {name} | not run: {missing} is not installed | |")
    return rows


def matrix_rows(losses: dict[tuple[str, str], list[float]], alone: list[float]) -> list[str]:
    """The second table: the largest difference after each checkpoint, in 1e-7, by who saved and who loaded it."""
    savers, loaders = ([name for name in (*CASES, XLA) if any(it[side] == name for it in losses)] for side in (0, 1))
    number = {name: i for i, name in enumerate((*CASES, XLA), 1)}  # names would make columns too wide for a phone
    rows = [
        "| saved by | " + " | ".join(str(number[name]) for name in loaders) + " |",
        "|---" * (len(loaders) + 1) + "|",
    ]
    for saver in savers:
        pairs = [(saver, loader) for loader in loaders]
        cells = [f"{difference(losses[it], after_saving(alone)) / 1e-7:.0f}" if it in losses else "" for it in pairs]
        rows.append(f"| {number[saver]}: {saver} | " + " | ".join(cells) + " |")
    return rows


def muon_rows(losses: dict[Any, list[float]]) -> list[str]:
    """The third table: with Muon, how far each case is from one process, and whose bits it has."""
    alone = losses["single process"]
    rows = ["| strategy | first 3 steps | all steps | bit-equal to | resumed |", "|---|---|---|---|---|"]
    by_name = {name: losses[name] for name in MUON}
    for name in MUON:
        source, resumed = next((pair[0], values) for pair, values in losses.items() if pair[1:] == (name,))
        equal = (
            "bit-equal"
            if resumed == after_saving(losses[source])
            else f"{difference(resumed, after_saving(losses[source])):.1e}"
        )
        early = difference(losses[name][:SAVED], alone[:SAVED])
        cells = (
            f"{early:.1e}",
            f"{difference(losses[name], alone):.1e}",
            same_bits(name, by_name),
            f"{source}: {equal}",
        )
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def thousand_rows() -> list[str]:
    """The table of 1,000 steps of Muon, from the results of its study: largest differences up to some steps."""
    rows = ["| precision | run | 1 | 10 | 100 | 300 | 1,000 | mean of the last 100 |", "|---" * 8 + "|"]
    for precision, found in json.loads(THOUSAND.read_text())["precisions"].items():
        for name, apart in found["differences"].items():
            rows.append(f"| {precision} | {name} | " + " | ".join(f"{value:.1e}" for value in apart.values()) + " |")
    return rows


def muon_section(losses: dict[Any, list[float]]) -> str:
    """The section about Muon."""
    return MUON_TEXT.format(muon="\n".join(muon_rows(losses)), thousand="\n".join(thousand_rows()))


def memory_rows(losses: dict[tuple[str, str, str], list[float]], alone: list[float]) -> list[str]:
    """The fourth table: with less memory, how far each case is from one process that saves none."""
    rows = ["| strategy | " + " | ".join(f"{way} | resumed" for way in SAVERS.values()) + " |", "|---|---|---|---|---|"]
    for name in MEMORY:
        cells = []
        for way in SAVERS:
            cells.append(f"{difference(losses[way, name, 'whole'], alone):.1e}")
            cells.append(f"{difference(losses[way, name, 'resumed'], after_saving(alone)):.1e}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def measured_memory() -> str:
    """Measure the section about memory."""
    with tempfile.TemporaryDirectory() as folder:
        alone = by_ranks(["single process"], losses_of, folder)["single process"]
        return MEMORY_TEXT.format(
            resumed=RESUMED, memory="\n".join(memory_rows(by_ranks(MEMORY, memory_losses, folder), alone))
        )


def on_xla(folder: str, sources: Iterable[str]) -> tuple[dict[str, list[float]], dict[tuple[str, str], list[float]]]:
    """Losses on one XLA device and after each checkpoint; both empty where XLA's environment is not there."""
    python = ROOT / ".venv-xla" / "bin" / "python"
    if not python.exists():
        return {}, {}
    command = [str(python), "-m", "tests.strategies.parity_table", "--xla", folder, *sources]
    done = run_command(command, timeout_s=3500.0, cwd=ROOT, env={"PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    return {XLA: got["losses"]}, {(source, XLA): values for source, values in got["loaded"].items()}


def main() -> None:
    """Run everything and keep the tables."""
    if sys.argv[1:2] == ["--xla"]:
        answer_for_xla(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["--memory"]:
        page = TABLE.read_text()
        begin = page.index(MEMORY_TEXT.splitlines()[0] if "## Less memory" in page else "## How this")
        TABLE.write_text(page[:begin] + measured_memory() + page[page.index("## How this") :])
        return
    with tempfile.TemporaryDirectory() as folder:
        muon = muon_section(by_ranks(MUON, muon_losses, folder))
    if sys.argv[1:2] == ["--muon"]:
        page = TABLE.read_text()
        TABLE.write_text(page[: page.index("## Muon")] + muon + page[page.index("## Less memory") :])
        return
    names = [name for name, case in CASES.items() if not case.missing]
    with tempfile.TemporaryDirectory() as folder:
        losses = by_ranks(names, losses_of, folder)
        xla, loaded = on_xla(folder, names)
        losses |= xla
        loaded |= by_ranks(names, load, list(losses), folder)
    keep(losses, loaded, muon)


def keep(losses: dict[str, list[float]], loaded: dict[tuple[str, str], list[float]], muon: str) -> None:
    """Write the tables and show them; exit with an error where something is too far off."""
    alone = losses["single process"]
    parity = parity_rows(losses)
    matrix = matrix_rows(loaded, alone)
    worst = max(difference(values, after_saving(alone)) for values in loaded.values())
    TABLE.write_text(
        TEXT.format(
            torch=torch.__version__,
            parameters=sum(p.numel() for p in TinyGPT().parameters()),
            parity="\n".join(parity),
            matrix="\n".join(matrix),
            worst=worst,
            steps=STEPS,
            batch=GLOBAL_BATCH,
            saved=SAVED,
            resumed=RESUMED,
            muon=muon + measured_memory(),
        )
    )
    print("\n".join([*parity, "", *matrix]))
    far = [name for name in losses if difference(losses[name], alone) > LIMIT]
    if far or worst > LIMIT:
        sys.exit(f"more than {LIMIT} apart: {far or 'a loaded checkpoint'}")


MUON_TEXT = """## Muon

The same model with [`WholeMatrix(torch.optim.Muon(...))`](../train/optimization.md#muon-over-divided-weights) for the
matrices of its blocks and AdamW for the rest, without clipping. Muon computes in bfloat16, which has three digits. Two
gradients that differ by the rounding of float32 can give updates that differ by the rounding of bfloat16. So the rows
of DDP, in which no matrix is divided, show how far two orders of summation are apart. The other strategies are about as
far. Where two strategies add gradients in the same order, they are equal bit for bit. The last column is of a
checkpoint: who saved it, and how far the next steps of this strategy are from the run that saved it.

{muon}

### 1,000 steps of Muon

Such differences grow with the steps, also in one process. The rows "noise" are one process that adds up the same
numbers in another order. The columns show the largest difference of a step's loss from that of one process, up to that
step; the last one compares the mean losses of the last 100 steps. From about step 100 on, a strategy is as far from one
process as the noise is, and the means stay within 0.005. In float32, FSDP x2 has the bits of DDP x2 in every step. The
losses fall from 4.97 to 0.18. `benchmarks/studies/muon_thousand.py` measures them.

{thousand}

"""

MEMORY_TEXT = """## Less memory

The same model with [`ActivationCheckpointing()`](../train/memory.md#compute-activations-again), which computes its
blocks again in the backward, and with `linear_cross_entropy`, a
[loss without all logits](../train/memory.md#compute-the-loss-without-all-logits). The numbers are the largest
differences from the losses of one process that does neither. The columns "resumed" are of the {resumed} steps after a
checkpoint that one process saved: the other rows go on with it on another number of processes.

{memory}

"""

TEXT = """# Strategies agree

Read this page before you change the strategy of a run. It shows that the losses agree under every strategy, to 1e-5.
It also shows that every strategy loads the checkpoints of every other one. [Strategies](strategies.md) says what each
one does.

Every strategy trains the same transformer ({parameters:,} parameters, tied embeddings, no dropout) in float32, from
the same seed, with {batch} samples per optimizer step. The optimizer is AdamW with a warm-up. Gradients are
clipped at a norm of 1.0. Each process runs two micro-batches per step. The test `tests/strategies/test_parity.py`
fails if a loss differs by more than 1e-5.

## Losses of {steps} steps

Each row shows the largest difference between the losses of this strategy and those of one process. The losses of
one process start near 4.97 and end near 4.10. The differences come from rounding: the sum of floating-point numbers
depends on their order. If two strategies add in the same order, their losses are equal bit for bit, and the last
column names the other strategy. `x2` means two processes. XLA runs on one device, with torch 2.9.

The names in the tables: TP is tensor, CP context and PP pipeline parallelism ([mesh](mesh.md),
[pipelines](pipelines.md)). 1F1B is a schedule of pipelines. HSDP 2x2 has two copies of the weights, each on two
processes ([FSDP](fsdp.md)). DP is torch's DataParallel ([DDP](ddp.md)). DeepSpeed 1 to 3 are its stages
([DeepSpeed](deepspeed.md)).

{parity}

## Checkpoints under other strategies

This table shows what happens if you change the strategy in the middle of a run. The strategy of the row saves a
checkpoint after step {saved}. The strategy of the column loads it into a new run and trains {resumed} more steps. The
columns are in the order of the rows, with the same numbers.

The cell shows the largest difference between these losses and those of one process that never stopped, in units of
1e-7: a 7 means 7e-07. The first loss depends on the loaded weights. The others also depend on the loaded optimizer
state. The largest difference of all is {worst:.1e}.

{matrix}

{muon}## How this page is made

`python -m tests.strategies.parity_table` wrote this page on a CPU with torch {torch}. To change its text, edit
`tests/strategies/parity_table.py`.
"""


if __name__ == "__main__":
    main()
