"""Faults 8 and 10 under NCCL: a rank that raises, and one that hangs, end the job soon and are named.

INSTEP_TEST_DEVICE=cpu runs the same under gloo.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import gpu
from tests.helpers.spawn import run_command

ON_CPU = os.environ.get("INSTEP_TEST_DEVICE") == "cpu"
pytestmark = [pytest.mark.dist] if ON_CPU else [pytest.mark.gpu, pytest.mark.dist, gpu.needs("NCCL")]

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
