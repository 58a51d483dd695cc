"""Ranks on CUDA devices.

Faults 8 and 10 under NCCL: a rank that raises, and one that hangs, end the job soon and are named. Then what needs a
process of its own on one device, since it is set when CUDA starts.

INSTEP_TEST_DEVICE=cpu runs the faults under gloo.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from instep import PartialState
from instep.callbacks import ModelCheckpoint
from instep.data import prepare_loader
from instep.launchers.notebook import notebook_launcher
from tests.helpers import gpu
from tests.helpers.spawn import run_command, run_ranks
from tests.strategies.tiny_gpt import TinyGPT, train

ON_CPU = os.environ.get("INSTEP_TEST_DEVICE") == "cpu"
pytestmark = [pytest.mark.dist] if ON_CPU else [pytest.mark.gpu, pytest.mark.dist]

JOB = """
import sys, time, torch
from torch import nn
from instep import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.trainer.global_rank == self.trainer.world_size - 1:
            if sys.argv[1] == "raise":
                raise RuntimeError("the bad batch")
            time.sleep(600)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    trainer = Trainer(accelerator=sys.argv[2], devices=int(sys.argv[3]), strategy="ddp", max_epochs=1,
        hang_timeout_s=5.0, enable_progress_bar=False, logger=False, default_root_dir=sys.argv[4])
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 4), 4))
"""


@gpu.needs("NCCL")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fault", "said"), [("raise", "RuntimeError: the bad batch"), ("hang", "time.sleep(600)")])
def test_a_rank_that_fails_ends_the_job_and_is_named(fault: str, said: str, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    count = 2 if ON_CPU else min(2, torch.cuda.device_count())
    words = [fault, "cpu" if ON_CPU else "cuda", str(count), str(tmp_path)]
    launch = [sys.executable, "-m", "instep.cli.main", "launch", "--devices", str(count)]
    started = time.monotonic()
    done = run_command([*launch, str(job), *words], cwd=tmp_path)
    assert time.monotonic() - started < 90
    written = "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.suffix in (".txt", ".log")
    )
    assert said in done.stdout + done.stderr + written
    if fault == "hang":
        assert done.returncode == 76
    else:
        assert done.returncode not in (0, 76)


def cut_up(folder: Path) -> dict[str, Any]:
    """What becomes of a small model under FSDP with one rank, and from its checkpoint."""
    settings: dict[str, Any] = {**gpu.ON_DEVICE, "batch_size": 16}
    saving = ModelCheckpoint(folder, every_n_train_steps=2, background=True)
    found: dict[str, Any] = {
        "alone": train(steps=4, **settings).losses,
        "whole": train("fsdp", steps=4, **settings).losses,
        "backend": dist.get_backend(),
        "mixed": train("fsdp", steps=4, precision="bf16-mixed", **settings).losses,
    }
    settings |= {"callbacks": [saving], "enable_checkpointing": True}
    first = train("fsdp", steps=2, **settings).losses
    rest = train("fsdp", steps=4, module=TinyGPT(), ckpt_path=saving.last_model_path, **settings).losses
    return {**found, "resumed": [*first, *rest]}


def test_one_rank_cuts_its_model_up_over_nccl(tmp_path: Path) -> None:
    [found] = run_ranks(cut_up, 1, tmp_path)
    assert found["whole"] == pytest.approx(found["alone"], abs=1e-3)
    assert found["mixed"] == pytest.approx(found["alone"], abs=0.05)
    assert found["resumed"] == pytest.approx(found["whole"], abs=1e-5)
    if gpu.on_device("collectives over NCCL"):
        assert "nccl" in found["backend"]


def repeated() -> tuple[list[float], list[float], str | None]:
    one, other = (train(**gpu.ON_DEVICE, deterministic=True, steps=4, batch_size=8).losses for _ in range(2))
    return one, other, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_a_deterministic_run_has_the_same_bits() -> None:
    """`trainer.devices.make_cublas_repeatable`: before the first product of its process."""
    [(one, other, config)] = run_ranks(repeated, 1)
    assert one == other
    assert config == (":4096:8" if gpu.on_device("the workspace of cuBLAS") else None)


def sent_parts() -> list[tuple[list[float], bool]]:
    """The batches that rank 0 alone read."""
    PartialState(cpu=True, timeout=300)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    numbers: Any = torch.arange(8.0)
    source = prepare_loader(
        DataLoader(numbers, 2), rank=rank, world_size=world, dispatch=True, device=torch.device(gpu.DEVICE)
    )
    return [(batch.tolist(), batch.is_pinned()) for batch in source]


def test_batches_that_were_sent_lie_in_pinned_memory() -> None:
    """`data.dispatch`."""
    first, second = run_ranks(sent_parts, 2)
    assert sorted(value for part, _ in (*first, *second) for value in part) == list(map(float, range(8)))
    if gpu.on_device("that batches lie in pinned memory"):
        assert all(pinned for _, pinned in (*first, *second))


def total() -> float:
    return float(torch.ones(2, device=gpu.DEVICE).sum())


def in_a_notebook() -> list[Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # a notebook is no rank
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on a fork beside threads is said to be one
    return notebook_launcher(total, num_processes=2)


def test_forked_ranks_of_a_notebook_have_the_device() -> None:
    """`launchers.notebook`: the devices are counted in a way that leaves CUDA usable after a fork."""
    assert run_ranks(in_a_notebook, 1) == [[2.0, 2.0]]
