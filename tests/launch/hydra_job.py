"""Program of a user of Hydra: each job trains a little, and each rank writes down where it was."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from instep import Trainer, seed_everything
from tests.trainer.toys import LoggingToy, loader


class Job(LoggingToy):
    """Raises, or asks for the end of the run, where the configuration says so."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg.lr)  # which saves the configuration as a hyperparameter
        self.do = cfg.do

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        if self.global_step == 2 and self.do == "fail" and last:
            raise ValueError("on purpose")
        if self.global_step == 2 and self.do == "interrupt" and self.trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


@hydra.main(version_base=None, config_path="hydra_conf", config_name="config")
def main(cfg: DictConfig) -> None:
    seed_everything(cfg.seed)
    module = Job(cfg)
    settings = {} if cfg.root is None else {"default_root_dir": cfg.root}
    trainer = Trainer(
        accelerator="cpu",
        devices=cfg.devices,
        max_epochs=2,
        logger=False,
        global_batch_size=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, loader(), ckpt_path="auto")
    trainer.validate(module, loader(), verbose=False)
    saved = Job.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, cfg=cfg)
    said = {
        "saved": [saved.hparams.cfg.lr, saved.hparams.cfg.do],
        "rank": trainer.global_rank,
        "cwd": os.getcwd(),
        "output": HydraConfig.get().runtime.output_dir,
        "log_dir": trainer.log_dir,
        "step": trainer.global_step,
        "weights": hashlib.sha256(module.layer.weight.detach().numpy().tobytes()).hexdigest(),
    }
    with open(Path(cfg.said), "a") as file:  # one short line at once
        file.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
