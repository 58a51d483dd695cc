"""Reports to Ray Train; tests/examples/test_ray_search.py has those to Ray Tune."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from instep.callbacks import RayReport
from instep.errors import SettingError
from tests.helpers.spawn import run_command
from tests.trainer.toys import Toy, loader, quiet

PROGRAM = """
import json, sys
import ray, torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from instep.callbacks import RayReport
from tests.trainer.toys import Toy, loader, quiet


class Logs(Toy):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", super().training_step(batch, batch_idx))

    def on_train_epoch_start(self):
        if self.fails and self.current_epoch == 2:
            raise RuntimeError("a node is lost")


def train(config):
    torch.manual_seed(1)
    module, path = Logs(), RayReport.ckpt_path()
    module.fails = config["fails"] and path is None
    report = RayReport({"loss": "val_loss"})
    trainer = quiet(max_epochs=4, enable_checkpointing=False, callbacks=[report])
    trainer.fit(module, loader(16), loader(8), ckpt_path=path)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    ends = []
    for fails in (False, True):
        common = {"storage_path": sys.argv[1], "name": str(fails)}
        run = RunConfig(**common, failure_config=FailureConfig(max_failures=1))
        workers = ScalingConfig(num_workers=2)
        done = TorchTrainer(train, train_loop_config={"fails": fails}, scaling_config=workers, run_config=run).fit()
        ends.append([done.metrics["loss"], done.metrics["epoch"], done.metrics["step"], done.checkpoint is not None])
    print("ENDS", json.dumps(ends))
"""


@pytest.mark.ray
@pytest.mark.dist
def test_workers_that_ray_starts_again_end_as_unbroken_ones(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_command([sys.executable, str(tmp_path / "program.py"), str(tmp_path / "ray")], env=environment)
    assert done.returncode == 0, done.stderr
    unbroken, again = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ENDS"))[5:])
    assert unbroken == again
    assert again[1:] == [3, 12, True]


@pytest.mark.ray
def test_a_metric_that_was_not_logged_is_named() -> None:
    trainer = quiet(max_epochs=1, enable_checkpointing=False, callbacks=[RayReport("val_los")])
    with pytest.raises(SettingError, match=r"val_los.*nothing of that name was logged"):
        trainer.fit(Toy(), loader(16), loader(8))
