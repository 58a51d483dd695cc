"""What every plug-in can test: that it keeps the rules which instep relies on."""

import math

import torch
from instep_example_plugin import AveragedGradients, BestMetric, SQLiteLogger
from instep_example_plugin.logger import read
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.testing import check_callback, check_logger, check_strategy
from instep.testing.ranks import in_ranks


def test_the_callback_keeps_its_state_over_a_restart():
    """A resumed run ends with the same best value."""
    check_callback(BestMetric)


def test_the_logger_has_each_step_once():
    """Also after a run that failed and was resumed."""
    check_logger(SQLiteLogger, read=lambda logger: read(str(logger.log_dir)))


def test_the_logger_gives_nan_back_as_nan(tmp_path):
    """SQLite has no NaN of its own."""
    logger = SQLiteLogger()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": math.nan}, step=1)
    logger.finalize()
    [(step, row)] = read(str(logger.log_dir))
    assert step == 1
    assert math.isnan(row["loss"])


def test_the_strategy_trains_like_one_process():
    """Losses, weights and checkpoints are those of one process."""
    check_strategy(AveragedGradients, devices=2)


class Branch(TrainModule):
    """The loss of rank 0 reaches both weights; that of other ranks reaches the first one alone."""

    def __init__(self):
        super().__init__()
        self.both, self.first_rank = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

    def training_step(self, batch, batch_idx):
        """Return a loss whose gradients are 1."""
        return self.both + self.first_rank if self.trainer.global_rank == 0 else self.both * 1.0

    def configure_optimizers(self):
        """Return SGD that subtracts the gradients."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def weights_after_a_step(folder):
    """Return this rank's weights after one step."""
    trainer = Trainer(
        accelerator="cpu",
        strategy=AveragedGradients(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Branch()
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(2)), batch_size=1))
    return [module.both.item(), module.first_rank.item()]


def test_a_rank_without_a_gradient_takes_part_in_the_mean(tmp_path):
    """It gives zeros, so that no other rank waits for ever or adds up gradients of two parameters."""
    assert in_ranks(weights_after_a_step, (str(tmp_path),), 2, 120.0) == [[-1.0, -0.5]] * 2
